"""Notebooks: what works in a kernel of Jupyter, and the downloads of the site.

`tests/test_site.py` runs the notebooks of the site, and a download of its pages.
"""

import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from IPython.core.inputtransformer2 import TransformerManager
from jupyter_client.manager import start_new_kernel
from myst_nb.core.read import read_myst_markdown_notebook
from nbclient import NotebookClient

DOCS = Path(__file__).parent.parent / "docs"
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.md"))
TIMEOUT = 300
spec = importlib.util.spec_from_file_location("notebook_downloads", DOCS / "notebook_downloads.py")
downloads = importlib.util.module_from_spec(spec)
spec.loader.exec_module(downloads)

EXPERIMENT = """
import dataclasses, fedpax
from fedpax.experiments.fedavg_images import fedavg_digits

def of_rounds(rounds, **fields):
    experiment = fedavg_digits()
    training = dataclasses.replace(experiment.training, rounds=rounds, **fields)
    return dataclasses.replace(experiment, training=training)
"""


def run(folder, *cells):
    """Run cells in a kernel, and return the outputs of each."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    resources = {"metadata": {"path": str(folder)}}
    client = NotebookClient(
        notebook, timeout=TIMEOUT, allow_errors=True, kernel_name="python3", resources=resources
    )
    client.execute()
    return [cell.outputs for cell in notebook.cells]


def text_of(outputs):
    """Return the texts, results and tracebacks of outputs, without colors."""
    parts = []
    for output in outputs:
        parts.append(output.get("text", ""))
        parts.append(output.get("data", {}).get("text/plain", ""))
        parts += output.get("traceback", [])
    return re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(parts))


def test_the_overview_links_each_notebook_and_its_download():
    overview = (DOCS / "notebooks.md").read_text()
    assert len(NOTEBOOKS) == 7
    for path in NOTEBOOKS:
        assert f"(notebooks/{path.name})" in overview
        assert f"<notebooks/{path.stem}.ipynb>" in overview
        assert f"\nnotebooks/{path.stem}\n" in overview


def test_pages_are_notebooks_with_a_kernel():
    for path in NOTEBOOKS:
        notebook = read_myst_markdown_notebook(path.read_text())
        nbformat.validate(notebook)
        assert notebook.metadata.kernelspec.name == "python3"
        assert notebook.cells[0].source.startswith("# ")
        assert sum(cell.cell_type == "code" for cell in notebook.cells) >= 3


def test_a_download_has_the_cells_of_its_page():
    for path in NOTEBOOKS:
        page = read_myst_markdown_notebook(path.read_text())
        made = downloads.notebook(path.read_text())
        nbformat.validate(made)
        install, *cells = made.cells
        assert "fedpax" in install.source and len(cells) == len(page.cells)
        for cell, of_page in zip(cells, page.cells, strict=True):
            assert cell.cell_type == of_page.cell_type
            if cell.cell_type == "code":
                assert cell.source == of_page.source
            else:  # a link to another page is its text
                expected = re.sub(r"\]\([\w/.#-]*\.md[\w#-]*\)", "", of_page.source)
                assert cell.source.replace("[", "") == expected.replace("[", "")
                assert ".md)" not in cell.source


def run_first_cell(monkeypatch, folder, installed):
    """Run the cell that installs fedpax, and return the packages that it would install."""
    packages = []
    shell = SimpleNamespace(run_line_magic=lambda magic, line: packages.append((magic, line)))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)
    monkeypatch.chdir(folder)
    code = TransformerManager().transform_cell(downloads.INSTALL)
    exec(code, {"get_ipython": lambda: shell})
    return packages


def test_the_first_cell_installs_the_wheel_if_fedpax_is_missing(monkeypatch, tmp_path):
    assert run_first_cell(monkeypatch, tmp_path, installed=True) == []
    with pytest.raises(FileNotFoundError, match="make package"):
        run_first_cell(monkeypatch, tmp_path, installed=False)
    wheel = tmp_path / "fedpax-0.2.0-py3-none-any.whl"
    wheel.touch()
    (installed,) = run_first_cell(monkeypatch, tmp_path, installed=False)
    assert installed[0] == "pip" and "wheels[-1]" in installed[1]


@pytest.mark.slow
def test_training_shows_a_bar_and_pictures_inline(tmp_path):
    _, trained, plotted, partitioned, again = run(
        tmp_path,
        EXPERIMENT,
        "run = fedpax.train(of_rounds(3), 'run'); run.rounds",
        "run.plot()",
        "import numpy as np\nfrom fedpax.data import plot_partition\n"
        "plot_partition([np.arange(3), np.arange(3, 9)], None)",
        "fedpax.train(of_rounds(3), 'run').rounds",
    )
    shown = text_of(trained)
    assert re.search(r"FedAvgImages: 100%\|█+\| 3/3 \[.*loss \d", shown)
    assert "IProgress" not in shown  # no advice about ipywidgets
    assert next(o for o in trained if o.output_type == "execute_result").data["text/plain"] == "3"
    for outputs in (plotted, partitioned):
        assert outputs[0].data["image/png"].startswith("iVBOR")  # base64 of a PNG file
    assert "Traceback" not in text_of(again)


@pytest.mark.slow
def test_an_interrupted_cell_resumes(tmp_path):
    manager, client = start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    try:
        cell = "run = fedpax.train(of_rounds({}, checkpoint_every=10**6), 'run'); run.rounds"

        def execute(code, interrupt_at=None):
            """Run a cell; interrupt it when a text is shown. Return its texts."""
            request, shown = client.execute(code), ""
            while True:
                message = client.get_iopub_msg(timeout=TIMEOUT)
                if message["parent_header"].get("msg_id") != request:
                    continue
                content = message["content"]
                shown += content.get("text", "") + "\n".join(content.get("traceback", []))
                shown += content.get("data", {}).get("text/plain", "")
                if interrupt_at and re.search(interrupt_at, shown):
                    manager.interrupt_kernel()
                    interrupt_at = None
                if message["msg_type"] == "status" and content["execution_state"] == "idle":
                    return shown

        execute(EXPERIMENT)
        interrupted = execute(cell.format(10**6), interrupt_at=r" [1-9]\d*/1000000 ")
        assert "KeyboardInterrupt" in interrupted
        done = execute(
            "import json; rounds = [json.loads(l)['round'] for l in open('run/metrics.jsonl')"
            " if 'loss' in l]; print('DONE', max(rounds))"
        )
        completed = int(re.search(r"DONE (\d+)", done)[1])
        assert completed >= 1
        # The same cell continues; it is interrupted again, further on.
        resumed = execute(cell.format(10**6), interrupt_at=r" \d+/1000000 .*loss")
        first = min(int(n) for n in re.findall(r" (\d+)/1000000 ", resumed))
        assert first >= completed and "KeyboardInterrupt" in resumed
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


@pytest.mark.slow
def test_a_program_and_an_experiment_defined_twice_are_the_new_ones(tmp_path):
    program = """
import jax, jax.numpy as jnp, fedpax

@fedpax.program(clients=4)
def total(x):
    return fedpax.federated_sum(fedpax.federated_map(lambda x: x + {}, x))

jax.jit(total)(jnp.arange(4.0)).item(), total(jnp.arange(4.0)).item()
"""
    experiment = """
from fedpax.algorithms import fedavg
from fedpax.experiments.fedavg_images import FedAvgImages
import optax

@dataclasses.dataclass(frozen=True, kw_only=True)
class Mine(FedAvgImages):
    def build(self):
        run = super().build()
        return run._replace(evaluate=lambda params: {{"loss": {}, "accuracy": 0.0}})

small = of_rounds(1)
fields = {{f.name: getattr(small, f.name) for f in dataclasses.fields(small)}}
fedpax.train(Mine(**fields), "run{}").evaluation["loss"]
"""
    one, two, _, first, second = run(
        tmp_path,
        program.format(1),
        program.format(2),
        EXPERIMENT,
        experiment.format(1.0, 1),
        experiment.format(2.0, 2),
    )
    assert "(10.0, 10.0)" in text_of(one) and "(14.0, 14.0)" in text_of(two)
    assert text_of(first).strip().endswith("1.0") and text_of(second).strip().endswith("2.0")


@pytest.mark.slow
def test_tracebacks_name_the_cell_and_its_line(tmp_path):
    mapped = """
import jax, jax.numpy as jnp, fedpax

def local_train(x):
    y = x + 1
    return y @ jnp.ones((3, 3))  # the wrong line

@fedpax.program(clients=4)
def total(x):
    return fedpax.federated_sum(fedpax.federated_map(local_train, x))

jax.jit(total)(jnp.arange(4.0))
"""
    reduced = """
@fedpax.program(clients=4)
def wrong(x):
    return fedpax.federated_sum(jnp.ones((3, 2)))

wrong(jnp.arange(4.0))
"""
    first, second = map(text_of, run(tmp_path, mapped.strip(), reduced.strip()))
    assert re.search(r"Cell In\[1\], line 5, in local_train", first)
    assert "----> 5     return y @ jnp.ones((3, 3))  # the wrong line" in first
    assert re.search(r"Cell In\[2\], line 3, in wrong", second)
    assert "expected a leading axis of size 4" in second
