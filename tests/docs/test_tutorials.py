"""Tutorials: they run, they are stored without noise, and they use only what users have."""

import ast
import re
from pathlib import Path

import pytest

import fednorms

pytest.importorskip("nbclient", reason="needs the extra dev")
pytest.importorskip("ipykernel", reason="needs the extra dev")
import nbformat

from docs import make_tutorials
from docs.make_tutorials import PARAMETERS, TUTORIALS, cleaned, executed

NOTEBOOKS = sorted(TUTORIALS.glob("*.ipynb"))
DEPLOYS = "05-privacy-and-deployment"
QUICK = "ROUNDS = SEEDS = DEPLOYED_ROUNDS = 1"
PATHS = re.compile(r"(?<![\w.:/])(?:/(?:home|root|tmp|usr|var|opt|work|private|Users|workspace)/|[A-Z]:\\+)[\w.-]+")

each_notebook = pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)


def code_cells(notebook):
    return [cell for cell in nbformat.read(notebook, as_version=4).cells if cell.cell_type == "code"]


def kinds(cells):
    """What each cell shows: printed text, or the formats of its outputs."""
    return [[output.get("name") or sorted(output.data) for output in cell.outputs] for cell in cells]


@pytest.fixture
def patient(monkeypatch):
    """Flower waits as long as a busy machine needs."""
    pytest.importorskip("flwr", reason="Flower is an optional extra: pip install 'fednorms[flower]'")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support" / "patient"))


def test_there_are_five_tutorials_in_the_order_of_their_numbers():
    assert [path.stem[:3] for path in NOTEBOOKS] == ["01-", "02-", "03-", "04-", "05-"]


@each_notebook
def test_a_tutorial_runs_with_fewer_rounds(notebook, tmp_path):
    """All of it, but for the processes of the deployment, which tests/flower starts, too."""
    before = ""
    if notebook.stem == DEPLOYS:
        pytest.importorskip("flwr", reason="Flower is an optional extra: pip install 'fednorms[flower]'")
        before = "## Start the server and the sites"
    executed(notebook, tmp_path, QUICK, before)


@pytest.mark.slow
@each_notebook
def test_a_tutorial_runs_in_full_and_shows_what_is_stored(notebook, patient, tmp_path):
    made = cleaned(executed(notebook, tmp_path))
    assert kinds([cell for cell in made.cells if cell.cell_type == "code"]) == kinds(code_cells(notebook))
    if notebook.stem == DEPLOYS:
        said = "".join(output.get("text", "") for cell in made.cells for output in cell.get("outputs", []))
        assert "attempts were refused" in said
        assert "equal, bit for bit: True" in said


def test_a_cell_that_fails_fails_the_tutorial(tmp_path):
    from nbclient.exceptions import CellExecutionError

    cells = [nbformat.v4.new_code_cell("N = 3"), nbformat.v4.new_code_cell("print(1 / N)")]
    cells[0].metadata["tags"] = [PARAMETERS]
    notebook = tmp_path / "one.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=cells), notebook)
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        executed(notebook, tmp_path, "N = 0")


@each_notebook
def test_a_tutorial_is_stored_as_the_maker_writes_it(notebook):
    read = nbformat.read(notebook, as_version=4)
    nbformat.validate(read)
    assert nbformat.writes(cleaned(read)).strip() == notebook.read_text(encoding="utf-8").strip()
    assert sum(PARAMETERS in cell.metadata.get("tags", []) for cell in read.cells) == 1


@each_notebook
def test_a_tutorial_was_saved_with_outputs_and_without_warnings(notebook):
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    assert len(outputs) >= 5
    assert not [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"]
    assert notebook.stat().st_size < 150_000


@each_notebook
def test_a_tutorial_names_no_path_of_a_machine(notebook):
    read = nbformat.read(notebook, as_version=4)
    for output in [output for cell in read.cells for output in cell.get("outputs", [])]:
        output.get("data", {}).pop("image/png", None)
    assert not PATHS.findall(nbformat.writes(read))


@pytest.mark.parametrize("path", ["/home/me/run", "saved in /tmp/x.y", '"/root/.cache"', "C:\\Users"])
def test_paths_of_machines_are_found(path):
    assert PATHS.search(path)
    assert not PATHS.search("https://example.org/home/me and data/tmp/x, 3 / 4")


@each_notebook
def test_a_tutorial_uses_only_public_names(notebook):
    code = "\n".join(cell.source for cell in code_cells(notebook))
    assert set(re.findall(r"\bfn\.(\w+)", code)) <= set(fednorms.__all__)
    assert not re.findall(r"(?:import|from) fednorms\.", code)


def test_the_shell_line_of_the_first_tutorial_is_its_comparison():
    """Otherwise its folder would hold other runs, and the command would be refused."""
    cells = nbformat.read(NOTEBOOKS[0], as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    calls = [n for n in ast.walk(ast.parse(code)) if isinstance(n, ast.Call) and ast.unparse(n.func) == "fn.compare"]
    [compared] = calls
    [first] = [
        ast.literal_eval(line.partition("=")[2].strip().partition("#")[0])
        for line in code.splitlines()
        if line.startswith("ROUNDS, SEEDS")
    ]
    values = {"ROUNDS": first[0], "SEEDS": first[1]}
    given = {k.arg: values.get(ast.unparse(k.value), ast.unparse(k.value).strip("'")) for k in compared.keywords}
    [command] = re.findall(r"`fednorms compare --methods ([^`]*)`", cells[-1].source)
    methods, *options = command.split(" --")
    assert methods.split() == ast.literal_eval(compared.args[0])
    typed = dict(option.split() for option in options)
    default = {"batch_size": str(fednorms.Training().batch_size)}
    assert default | typed == {key: str(value) for key, value in given.items()}


def test_outputs_are_cleaned():
    cell = nbformat.v4.new_code_cell("1")
    cell.execution_count = 7
    cell.metadata["execution"] = {"iopub.status.busy": "now"}
    cell.outputs = [
        nbformat.v4.new_output("stream", text="\u2819 reading: 3 of 9\r\n\x1b[1mbold\x1b[0m\r\n"),
        nbformat.v4.new_output("execute_result", data={"text/plain": "1"}, execution_count=7, metadata={"a": 1}),
    ]
    [made] = cleaned(nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {}})).cells
    assert made.outputs[0].text == "bold\n"
    assert (made.execution_count, made.metadata, made.outputs[1].metadata) == (None, {}, {})
    assert made.id == "cell-01"


def test_pictures_become_small():
    import base64
    import io

    from PIL import Image

    buffer = io.BytesIO()
    Image.effect_noise((1600, 400), 50).save(buffer, "PNG")
    picture = base64.b64encode(buffer.getvalue()).decode()
    small = make_tutorials._small(picture)
    assert Image.open(io.BytesIO(base64.b64decode(small))).size == (800, 200)
    assert len(small) < len(picture) / 2
    assert make_tutorials._small(small) == small
