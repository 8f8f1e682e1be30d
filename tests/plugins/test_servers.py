"""Which server a run gets: by name, by `auto`, by its keys; messages of errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from agentrig.errors import AgentrigError, ConfigError, PluginError
from agentrig.plan import Plan, resolve
from agentrig.servers import ServerPlan

FAST = """
import attrs
from agentrig import AlgorithmSpec, ServerSpec, hookimpl, setting
from agentrig_grpo.config import GrpoConfig

@attrs.frozen(kw_only=True)
class Config:
    lanes: int = setting(1, help="lanes")

def refusal(hardware):
    if {raises}:
        raise OSError("no such library")
    return {why!r}

@hookimpl
def register_servers():
    yield ServerSpec(name="fast", summary="x", config=Config, build=lambda config: print, rank={rank}, refusal=refusal)

@attrs.frozen(kw_only=True)
class OwnKeys:
    server_threads: int = setting(1, help="its own")

@hookimpl
def register_algorithms():
    yield AlgorithmSpec(name="own-keys", summary="x", config=OwnKeys, build=lambda config: None, server=True)
    yield AlgorithmSpec(name="silent", summary="x", config=GrpoConfig, build=lambda config: None)
"""


@pytest.fixture
def fast(tmp_path: Path) -> Callable[..., str]:
    def write(why: str = "", rank: int | None = 10, raises: bool = False) -> str:
        file = tmp_path / f"fast_{len(list(tmp_path.iterdir()))}.py"
        file.write_text(FAST.format(why=why, rank=rank, raises=raises))
        return str(file)

    return write


def server_of(plan: Plan) -> tuple[str, str]:
    return plan.components["server"].spec.name, plan.reasons["server"]


def cpu(*overrides: str, files: tuple[str, ...] = ()) -> Plan:
    return resolve("mini", overrides=["hardware.use=cpu", 'run.block=["agentrig-vllm"]', *overrides], files=files)


def test_auto_takes_the_highest_rank_that_can_serve_with_a_reason(fast: Callable[..., str]) -> None:
    assert server_of(cpu()) == ("embedded", "it is the first that serves on cpu")
    assert server_of(cpu(files=(fast(),))) == ("fast", "it is the first that serves on cpu")
    refused = cpu(files=(fast("it needs a GPU"),))
    assert server_of(refused) == ("embedded", "fast: it needs a GPU")
    assert server_of(cpu(files=(fast(rank=None),)))[0] == "embedded", "without a rank only by its name"


def test_a_refusal_that_raises_leaves_its_server_out(
    fast: Callable[..., str], caplog: pytest.LogCaptureFixture
) -> None:
    name, why = server_of(cpu(files=(fast(raises=True),)))
    assert name == "embedded"
    assert "fast: its `refusal` raised OSError: no such library" in why
    assert "server fast is left out" in caplog.text


def test_a_key_that_one_server_has_selects_it(fast: Callable[..., str]) -> None:
    assert server_of(cpu("server.batch=3", files=(fast(),))) == ("embedded", "fast: it has no key batch")
    plan = cpu("server.lanes=3", files=(fast(),))
    assert (server_of(plan)[0], plan.configs["server"].lanes) == ("fast", 3)
    with pytest.raises(ConfigError, match=r"no model server can be used on cpu:\n  fast: it has no key batch\n  emb"):
        server_of(cpu("server.lanes=3", "server.batch=3", files=(fast(),)))
    with pytest.raises(ConfigError, match=r'\[server\] no server .* has a key "batsh"\. Did you mean "batch"'):
        cpu("server.batsh=3")


def test_verbose_names_the_server_and_the_reason(fast: Callable[..., str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", logger="agentrig")
    plan = cpu(files=(fast("it needs a GPU"),))
    plan.check_server(plan.use_hardware())
    assert "the model's server is embedded (fast: it needs a GPU); another one: --server NAME" in caplog.text
    named = cpu("server.use=fast", files=(fast("it needs a GPU"),))
    with pytest.raises(ConfigError, match=r"server fast can't serve on cpu: it needs a GPU"):
        named.check_server(named.use_hardware())
    assert "server" not in named.reasons


@pytest.mark.parametrize("word", ["server.use=embedded", "server.threads=2", "server.batch=3"])
def test_an_algorithm_with_its_own_server_refuses_another(toy_plan: Callable[..., Plan], word: str) -> None:
    asked = 'use = "embedded"' if "use" in word else word.split(".")[1].split("=")[0]
    with pytest.raises(ConfigError, match=rf"\[server\] {asked}: algorithm toy-number brings its own model server"):
        toy_plan(word)
    assert toy_plan().components["server"].spec.name == "own"
    assert toy_plan("server.use=own").components["server"].spec.name == "own"


def test_verl_keeps_its_own_server() -> None:
    assert resolve("qwen", overrides=["hardware.use=cuda"]).components["server"].spec.name == "own"
    with pytest.raises(ConfigError, match=r'\[server\] use = "embedded": algorithm verl brings its own model server'):
        resolve("qwen", uses={"server": "embedded"}, overrides=["hardware.use=cuda"])


def test_an_algorithm_without_a_server_of_its_own_refuses_own() -> None:
    with pytest.raises(ConfigError, match=r'use = "own": algorithm grpo brings no model server of its own'):
        cpu("server.use=own")
    plan = cpu()
    with pytest.raises(AgentrigError, match="the server `own` is the algorithm's own"):
        plan.registry.find("server", "own").spec.build(None)


def test_another_algorithm_drops_the_servers_settings(tmp_path: Path, fast: Callable[..., str]) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('recipe = "mini"\n[server]\nuse = "embedded"\nbatch = 3\n')
    changed = resolve(str(file), uses={"algorithm": "own-keys"}, files=[fast()], overrides=["hardware.use=cpu"])
    assert server_of(changed)[0] == "fast"
    both = ["algorithm.use=own-keys", "server.use=embedded", "server.batch=5", "algorithm.server_threads=7"]
    for words in (both, [both[1], both[2], both[0], both[3]]):
        plan = resolve(str(file), overrides=words, files=[fast()])
        assert (plan.components["server"].spec.name, plan.configs["server"].batch) == ("embedded", 5)
        assert (plan.configs["algorithm"].server_threads, plan.configs["server"].threads) == (7, 0), "its own key"


def test_an_algorithm_whose_spec_does_not_declare_it_gets_a_server_with_a_warning(
    fast: Callable[..., str], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    plan = resolve("mini", overrides=["hardware.use=cpu"], uses={"algorithm": "silent"}, files=[fast("no GPU")])
    assert plan.components["server"].spec.name == "own"
    assert plan.components["credit"].spec.name == "own", "it takes none, whatever the recipe says"
    made = plan.make_server()(ServerPlan(model=tmp_path, name="policy", hardware=plan.use_hardware()))
    assert type(made).__name__ == "Embedded"
    assert "algorithm silent asks for a model server; let its spec say so" in caplog.text


def test_a_server_that_cannot_be_built_names_its_plugin(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "from agentrig import ServerSpec, hookimpl\n"
        "@hookimpl\n"
        "def register_servers():\n"
        "    yield ServerSpec(name='wrong', summary='x', build=lambda config: None)\n"
    )
    plan = cpu("server.use=wrong", files=(str(file),))
    with pytest.raises(PluginError, match=r"the server wrong cannot be built: .*wrong.py:4.* must return a callable"):
        plan.make_server()
