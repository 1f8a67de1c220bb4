"""The installer of the CPU build: resumable steps, and a clear word where something is missing."""

import json
import subprocess

import pytest

from demo import system_packages
from demo.sglang_cpu import recipe, setup


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """The installer on an empty folder, with its slow steps replaced by notes of their names."""
    venv, model = tmp_path / "venv", tmp_path / "model"
    monkeypatch.setattr(recipe, "VENV", venv)
    monkeypatch.setattr(recipe, "MODEL", model)
    monkeypatch.setattr(setup, "STAMPS", venv / "recipe.json")
    ran = []

    def make(name, folder):
        def step():
            ran.append(name)
            folder.mkdir(exist_ok=True)
            (folder / "config.json").write_text("{}")

        return step

    for name in ("make_venv", "install_torch", "install_packages", "install_shim"):
        monkeypatch.setattr(setup, name, make(name, venv))
    monkeypatch.setattr(setup, "make_model", make("make_model", model))
    return ran


def test_a_second_run_does_nothing(steps):
    assert setup.main() == 0
    assert steps == ["make_venv", "install_torch", "install_packages", "install_shim", "make_model"]
    steps.clear()
    assert setup.main() == 0
    assert steps == []


def test_a_failed_step_is_where_the_next_run_goes_on(steps, monkeypatch):
    good = setup.install_packages

    def fail():
        raise subprocess.CalledProcessError(1, ["pip"])

    monkeypatch.setattr(setup, "install_packages", fail)
    with pytest.raises(subprocess.CalledProcessError):
        setup.main()
    steps.clear()
    monkeypatch.setattr(setup, "install_packages", good)
    setup.main()
    assert steps == ["install_packages", "install_shim", "make_model"]


def test_another_torch_runs_that_step_and_those_after_it(steps, monkeypatch):
    setup.main()
    steps.clear()
    monkeypatch.setattr(setup, "TORCH_SPEC", "torch==2.14.0")
    setup.main()
    assert steps == ["install_torch", "install_packages", "install_shim", "make_model"]


def test_a_lost_model_is_made_again(steps):
    setup.main()
    steps.clear()
    (recipe.MODEL / "config.json").unlink()
    setup.main()
    assert steps == ["make_model"]


def test_a_torn_stamp_file_means_nothing_is_installed(steps):
    setup.main()
    setup.STAMPS.write_text('{"venv": ')
    assert setup.read_stamps() == {}


def test_no_usable_python_names_what_to_install(monkeypatch):
    monkeypatch.setattr(setup, "_can_make_venv", lambda *_: False)
    with pytest.raises(setup.SetupError, match=r"3\.11 or 3\.12.*\n.*apt-get install python3"):
        setup.find_python()


def test_digest_sees_content_and_names(tmp_path):
    (tmp_path / "a.py").write_text("1")
    before = setup.digest(tmp_path)
    assert setup.digest(tmp_path) == before
    (tmp_path / "a.py").rename(tmp_path / "b.py")
    assert setup.digest(tmp_path) != before


def test_ranks_get_cores_of_their_own():
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in recipe.server_env(1)
    assert recipe.server_env(2)["SGLANG_CPU_OMP_THREADS_BIND"].count("|") == 1


def test_missing_system_packages_are_named_where_we_are_not_root(monkeypatch, capsys):
    monkeypatch.setattr(system_packages, "missing", lambda: list(system_packages.NEEDS))
    monkeypatch.setattr(system_packages, "root_prefix", lambda: None)
    assert system_packages.main() == 1
    assert "strace is missing" in (said := capsys.readouterr().out)
    assert "apt-get install openssh-server" in said


def test_without_strace_alone_the_demo_still_runs(monkeypatch):
    optional = [need for need in system_packages.NEEDS if not need.required]
    monkeypatch.setattr(system_packages, "missing", lambda: optional)
    monkeypatch.setattr(system_packages, "root_prefix", lambda: None)
    assert system_packages.main() == 0


def test_the_inventory_of_the_demo_is_a_valid_one(tmp_path):
    from demo.layout import Layout, write_inventory
    from demo.sshd import DemoSshd
    from fleetdump.inventory import load

    layout = Layout(tmp_path)
    sshd = DemoSshd(2222, "me", tmp_path / "key", "SHA256:" + "A" * 43, tmp_path / "log")
    write_inventory(layout, sshd, tp=2)
    (host,) = load(layout.inventory).select([], [], ad_hoc=False)
    assert (host.address, host.port, host.servers[0].tp) == ("127.0.0.1", 2222, 2)
    assert host.capture.spec().layers == [1, 3, 5]
    assert json.loads(json.dumps(host.servers[0].env))["SGLANG_USE_CPU_ENGINE"] == "1"
