"""Runs one program, watches its limits, and ends all that it has started. A process of its own, on Linux.

The program's descendants can leave its session and clear their environment. They stay descendants of this process,
because it adopts orphans (PR_SET_CHILD_SUBREAPER). When it has no child any more, none is left.

It is started for every program as `python -I -S supervisor.py CHANNEL SECONDS MEMORY DISK PROCESSES FOLDER CONTAINER
COMMAND …`, so it imports little, and nothing of agentrig's. CHANNEL is the number of an inherited socket. If its other
end is closed, or sends something, the program ends. It gets the report, one line of words: see
`agentrig.external.running`.

Runners adopt and end the descendants of an agent by the same functions: see `agentrig.processes.families`.

CONTAINER is empty, or the JSON of an `agentrig.external.running.Container` in which docker or podman runs the program.
Then the daemon, not this process, is above the program. So it is watched by its control group, and removed by a
command. If this process is killed, a guard that no family of processes knows does that.
"""

import os
import select
import signal
import sys
import time

TYPE_CHECKING = False  # `typing` takes as long to import as all the rest
if TYPE_CHECKING:
    import resource
    from collections.abc import Callable

POLL_S = 0.1
"""Shortest time between two looks at the limits, seconds."""

LONGEST_POLL_S = 2.0
BUSY = 20
"""A pause is this many times as long as the look before it: looking takes 5% of a core at most."""

END_S = 20.0
"""How long processes may take to die after SIGKILL, seconds: tens of them took more than 5 on a busy machine."""

PAGE = os.sysconf("SC_PAGE_SIZE")
ENTRY = 512
"""Bytes that each file and folder counts, also an empty one."""

SUBREAPER, PARENT_ENDS = 36, 1
"""PR_SET_CHILD_SUBREAPER and PR_SET_PDEATHSIG, of <linux/prctl.h>."""

REMOVE_S = 30.0
"""How long the removal of a container, or a question about it, may take, seconds."""

GUARD = 'read -r removed || for n in 1 2 3 4 5; do sleep 1; "$@" && break; done'
"""What the guard does: the pipe at its input ends without a line if this process is killed."""


class Supervisor:
    """One program and its descendants.

    Args:
        channel: The socket to the runner.
        limits: Seconds, bytes of memory, bytes below `folder`, processes; 0 for no limit.

    Attributes:
        exceeded: The limit that ended the program, or `stopped` if the runner did; `-` if it ended by itself.
        observed: What was measured against that limit.
        peak: Most memory at once, bytes.
        cpu_s: CPU seconds of all its processes that have ended.
        status: The program's exit code, negative for a signal.
    """

    def __init__(self, channel: int, limits: list[float], folder: str, container: "Container | None" = None) -> None:
        self.channel, self.folder, self.container = channel, folder, container
        self.seconds, self.memory, self.disk, self.processes = limits
        self.exceeded, self.observed = "-", 0.0
        self.peak, self.cpu_s, self.status = 0.0, 0.0, 0
        self.child = 0

    def start(self, command: list[str]) -> int:
        """Start the program in a session of its own; return the number of the error that prevents it, or 0."""
        out, into = os.pipe()  # closed by a successful exec
        self.child = os.fork()
        if self.child == 0:
            try:
                os.setsid()
                self._limit()
                os.execvp(command[0], command)
            except OSError as error:
                os.write(into, str(error.errno).encode())
            finally:
                os._exit(127)
        os.close(into)
        failed = os.read(out, 16)
        os.close(out)
        return int(failed or 0)

    def _limit(self) -> None:
        """Set what the kernel enforces: no core files, no larger file, and first to end if memory is short."""
        import resource

        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores them, and exec would keep that
            signal.signal(number, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if self.container is not None:
            return  # the container has the others; this is docker's or podman's own command
        if self.disk:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(self.disk), int(self.disk)))
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")

    def watch(self) -> None:
        """Wait until the program ends, a limit is exceeded, or the runner wants its end."""
        watched, start, pause = os.pidfd_open(self.child), time.monotonic(), POLL_S
        events = select.poll()  # not `select`: the channel's number may be 1024 or more
        events.register(watched, select.POLLIN)
        events.register(self.channel, select.POLLIN)
        while True:
            left = start + self.seconds - time.monotonic() if self.seconds else pause
            ready = [number for number, _ in events.poll(1000 * max(0.0, min(pause, left)))]
            if watched in ready:
                return
            if self.channel in ready:
                self.exceeded = "stopped"
                return
            before = time.process_time()
            self._look(time.monotonic() - start)
            if self.exceeded != "-":
                return
            pause = min(LONGEST_POLL_S, max(POLL_S, BUSY * (time.process_time() - before)))

    def _look(self, seconds: float) -> None:
        """Compare what is used with the limits."""
        family = descendants() if self.container is None else self.container.processes()
        memory = sum(memory_of(pid) for pid in family)
        if memory > self.peak and len(family) > 1:  # they may share pages since a fork
            memory = sum(part_of(pid) for pid in family)
        self.peak = max(self.peak, memory)
        self._compare("time", seconds, self.seconds)
        self._compare("processes", len(family) - (self.container is None), self.processes)
        self._compare("memory", memory, self.memory)
        if self.disk:
            self._compare("disk", size_of(self.folder), self.disk)

    def _compare(self, name: str, value: float, limit: float) -> None:
        if limit and value >= limit and self.exceeded == "-":
            self.exceeded, self.observed = name, value

    def end(self) -> tuple[int, int]:
        """Kill all descendants; return how many were left by a program that had ended, and how many do not die."""
        if self.container is not None:
            self._end_container(self.container)
        left, undead = end_descendants(self._ended)
        if undead:
            return left, undead
        if self.disk and self.exceeded == "-":  # it may have ended between two looks
            self._compare("disk", size_of(self.folder), self.disk)
        return left, 0

    def _end_container(self, container: "Container") -> None:
        """Remove the container, and ask before whether its memory was too small for a program that has failed."""
        if self.exceeded == "-" and self.child:
            self._ended(*os.wait4(self.child, 0))
            if self.status and self.memory and container.ran_out_of_memory():
                self.exceeded, self.observed = "memory", self.memory
        container.remove()

    def _ended(self, pid: int, status: int, used: "resource.struct_rusage") -> None:
        """Count what a process has used that has ended."""
        if self.container is None:  # else it is docker's or podman's use
            self.cpu_s += used.ru_utime + used.ru_stime
            self.peak = max(self.peak, used.ru_maxrss * 1024)
        if pid == self.child:
            self.status = os.waitstatus_to_exitcode(status)


class Container:
    """The container that a program runs in."""

    def __init__(self, word: str) -> None:
        import json

        found = json.loads(word)
        self._id_file, self._remove, self._asks = found["id_file"], found["remove"], found["out_of_memory"]
        self._guard, self._id = -1, ""

    def guard(self) -> None:
        """Start the guard. It must be no descendant, so this comes before `adopt_orphans`."""
        out, self._guard = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                os.setsid()
                if os.fork() == 0:
                    null = os.open(os.devnull, os.O_WRONLY)
                    for source, target in ((out, 0), (null, 1), (null, 2)):
                        os.dup2(source, target)
                    kept = {name: value for name, value in os.environ.items() if not name.startswith("AGENTRIG_")}
                    os.execve("/bin/sh", ["sh", "-c", GUARD, "sh", *self._remove], kept)
            finally:
                os._exit(0)
        os.close(out)
        os.waitpid(child, 0)

    def processes(self) -> list[int]:
        """Return its processes; none if its daemon runs on another machine, where its own limits hold."""
        if not self._id:
            try:
                with open(self._id_file, encoding="ascii") as file:
                    self._id = file.read().strip()
            except OSError:
                pass  # it is not made yet
        return [pid for pid in numbers() if self._id in groups_of(pid)] if self._id else []

    def ran_out_of_memory(self) -> bool:
        """Whether the kernel has ended a process of it for lack of memory."""
        done, said = output_of(self._asks)
        return done and said.strip() == b"true"

    def remove(self) -> None:
        """Remove it; if that fails, the guard tries again."""
        if output_of(self._remove)[0]:
            os.write(self._guard, b"\n")
        os.close(self._guard)


def output_of(words: list[str]) -> tuple[bool, bytes]:
    """Run a command for at most `REMOVE_S`; return whether it succeeded, and what it wrote to stdout."""
    import subprocess  # slow to import; a program without a container does not need it

    none = subprocess.DEVNULL
    with os.fdopen(os.memfd_create("stdout"), "rb") as stdout:  # no pipe: what it leaves running may hold that open
        try:
            done = subprocess.run(words, stdin=none, stdout=stdout, stderr=none, timeout=REMOVE_S)
        except (OSError, subprocess.TimeoutExpired):
            return False, b""
        stdout.seek(0)
        return done.returncode == 0, stdout.read()


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends."""
    _control(SUBREAPER, 1)


def end_with_parent(parent: int) -> None:
    """Let this process be killed when its parent ends, or now if it has ended."""
    _control(PARENT_ENDS, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _control(option: int, value: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")


def numbers() -> list[int]:
    """Return all processes."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def groups_of(pid: int) -> str:
    """Return the control groups that a process is in, but for podman's own."""
    try:
        with open(f"/proc/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            return "".join(line for line in file if "conmon" not in line)
    except OSError:
        return ""  # it has ended


def descendants() -> list[int]:
    """Return the processes below this one."""
    if os.path.exists("/proc/thread-self/children"):  # without a look at all other processes of the machine
        found = children_of(os.getpid())
        for pid in found:
            found += children_of(pid)
        return found
    children: dict[int, list[int]] = {}
    for pid in numbers():
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            continue  # it has ended
        children.setdefault(parent, []).append(pid)
    found = list(children.get(os.getpid(), ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def children_of(pid: int) -> list[int]:
    """Return the children of a process, as the kernel lists them; one that ends just now may hide others."""
    found = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", "rb") as file:
                found += [int(word) for word in file.read().split()]
    except OSError:
        pass  # it has ended
    return found


def end_descendants(reaped: "Callable[[int, int, resource.struct_rusage], object]") -> tuple[int, int]:
    """Kill all processes below this one, which must have called `adopt_orphans`.

    Args:
        reaped: Called with what `os.wait4` returns for each that has ended.

    Returns:
        How many were killed, and how many do not die within `END_S`.
    """
    killed: set[int] = set()
    limit = time.monotonic() + END_S
    while True:
        try:
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                reaped(*ended)
        except ChildProcessError:  # there is none, so there is no descendant either
            return len(killed), 0
        found = descendants()
        if time.monotonic() > limit:
            return len(killed), len(found)
        for pid in found:
            try:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            except OSError:
                continue  # it has ended
        time.sleep(0.002)


def memory_of(pid: int) -> int:
    """Return the bytes of a process's memory that are not a file's."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            words = file.read().split()
    except OSError:
        return 0
    return (int(words[1]) - int(words[2])) * PAGE


def part_of(pid: int) -> int:
    """Return the same, with a page that n processes share counted as 1/n: exact for a family, but slow to read."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"Pss_Anon:"))
    except (OSError, StopIteration):
        return memory_of(pid)  # another user's, or an older kernel's


def size_of(folder: str) -> int:
    """Return the bytes of the disk that the files below a folder use."""
    size, folders = 0, [folder]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    size += ENTRY + 512 * entry.stat(follow_symlinks=False).st_blocks
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError:
            continue  # it was removed meanwhile, or may not be read
    return size


def main(words: list[str]) -> None:
    """Run the program and report."""
    os.set_inheritable(int(words[1]), False)  # the program must not write reports
    container = Container(words[7]) if words[7] else None
    made = Supervisor(int(words[1]), [float(word) for word in words[2:6]], words[6], container)
    if container is not None:
        container.guard()
    adopt_orphans()
    try:
        failed = made.start(words[8:])
        if not failed:
            made.watch()
    finally:  # an error of this process too must leave nothing
        left, undead = made.end()
    if container is not None:
        left = 0  # what is left of podman's own work; the container's processes end with its first
    report = (failed, made.status, made.exceeded, int(made.observed), left, undead, f"{made.cpu_s:.3f}", int(made.peak))
    try:
        os.write(made.channel, " ".join(str(word) for word in report).encode() + b"\n")
    except OSError:
        return  # the runner has died: nobody reads it


if __name__ == "__main__":
    main(sys.argv)
