"""Runs one program, watches its limits, and ends all that it has started. A process of its own, on Linux.

The program's descendants can leave its session and clear their environment. They stay descendants of this process,
because it adopts orphans (PR_SET_CHILD_SUBREAPER). When it has no child any more, none is left.

It is started for every rollout as `python -I -S supervisor.py CHANNEL SECONDS MEMORY DISK PROCESSES FOLDER N AFTER …
COMMAND …`, so it imports little, and nothing of agentrig's. CHANNEL is the number of an inherited socket. If its other
end is closed, or sends something, the program ends. It gets the report, one line of words: see
`agentrig.programs.running`. AFTER, N words, is run after a program that did not end by itself: it removes a container.
"""

import os
import select
import signal
import sys
import time

POLL_S = 0.1
"""Shortest time between two looks at the limits, seconds."""

LONGEST_POLL_S = 2.0
BUSY = 20
"""A pause is this many times as long as the look before it: looking takes 5% of a core at most."""

END_S = 5.0
"""How long processes may take to die after SIGKILL, seconds."""

PAGE = os.sysconf("SC_PAGE_SIZE")
ENTRY = 512
"""Bytes that each file and folder counts, also an empty one."""

SUBREAPER = 36
"""PR_SET_CHILD_SUBREAPER, of <linux/prctl.h>."""


class Supervisor:
    """One program and its descendants.

    Args:
        channel: The socket to the runner.
        limits: Seconds, bytes of memory, bytes below `folder`, processes; 0 for no limit.
        folder: The program's working directory.

    Attributes:
        exceeded: The limit that ended the program, or `stopped` if the runner did; `-` if it ended by itself.
        observed: What was measured against that limit.
        peak: Most memory at once, bytes.
        cpu_s: CPU seconds of all its processes that have ended.
        status: The program's exit code, negative for a signal.
    """

    def __init__(self, channel: int, limits: list[float], folder: str) -> None:
        self.channel, self.folder = channel, folder
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
        if self.disk:
            resource.setrlimit(resource.RLIMIT_FSIZE, (int(self.disk), int(self.disk)))
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")

    def watch(self) -> None:
        """Wait until the program ends, a limit is exceeded, or the runner wants its end."""
        watched, start, pause = os.pidfd_open(self.child), time.monotonic(), POLL_S
        while True:
            left = start + self.seconds - time.monotonic() if self.seconds else pause
            ready, _, _ = select.select([self.channel, watched], [], [], max(0.0, min(pause, left)))
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
        family = descendants()
        memory = sum(memory_of(pid) for pid in family)
        self.peak = max(self.peak, memory)
        self._compare("time", seconds, self.seconds)
        self._compare("memory", memory, self.memory)
        self._compare("processes", len(family) - 1, self.processes)
        if self.disk:
            self._compare("disk", size_of(self.folder), self.disk)

    def _compare(self, name: str, value: float, limit: float) -> None:
        if limit and value >= limit and self.exceeded == "-":
            self.exceeded, self.observed = name, value

    def end(self) -> tuple[int, int]:
        """Kill all descendants; return how many were left by a program that had ended, and how many do not die."""
        killed: set[int] = set()
        limit = time.monotonic() + END_S
        while True:
            try:
                while self._reap():
                    pass
            except ChildProcessError:  # there is none, so there is no descendant either
                break
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
        if self.disk and self.exceeded == "-":  # it may have ended between two looks
            self._compare("disk", size_of(self.folder), self.disk)
        return len(killed), 0

    def _reap(self) -> bool:
        pid, status, used = os.wait4(-1, os.WNOHANG)
        self.cpu_s += used.ru_utime + used.ru_stime
        self.peak = max(self.peak, used.ru_maxrss * 1024)
        if pid == self.child:
            self.status = os.waitstatus_to_exitcode(status)
        return pid != 0


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent ends."""
    import ctypes

    if ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def descendants() -> list[int]:
    """Return the processes below this one."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:
                continue  # it has ended
            children.setdefault(parent, []).append(int(name))
    found = list(children.get(os.getpid(), ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def memory_of(pid: int) -> int:
    """Return the bytes of a process's memory that are not a file's."""
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            words = file.read().split()
    except OSError:
        return 0
    return (int(words[1]) - int(words[2])) * PAGE


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
    made = Supervisor(int(words[1]), [float(word) for word in words[2:6]], words[6])
    os.set_inheritable(made.channel, False)  # the program must not write reports
    adopt_orphans()
    after = 8 + int(words[7])
    failed = made.start(words[after:])
    if not failed:
        made.watch()
    left, undead = made.end()
    if words[8:after] and made.exceeded != "-":
        os.waitpid(os.posix_spawnp(words[8], words[8:after], os.environ), 0)
    report = (failed, made.status, made.exceeded, int(made.observed), left, undead, f"{made.cpu_s:.3f}", int(made.peak))
    try:
        os.write(made.channel, " ".join(str(word) for word in report).encode() + b"\n")
    except OSError:
        return  # the runner has died: nobody reads it


if __name__ == "__main__":
    main(sys.argv)
