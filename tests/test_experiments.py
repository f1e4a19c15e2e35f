"""The experiments' command line and runner: folders, rows, resumption, reports, sweeps, and what bad input gives."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest

from experiments import __main__ as command
from experiments import commands, runner
from experiments.experiment import Experiment, Picture, Table, Verbatim
from experiments.plot import grid, lines
from experiments.render import html_parts, markdown, terminal
from experiments.waste import EXPERIMENT as WASTE
from experiments.waste import Waste


@dataclasses.dataclass(frozen=True)
class Squares:
    """Squares of numbers."""

    numbers: tuple[int, ...] = (1, 2, 3)
    """What to square."""
    seed: int = 0
    """Unused."""

    def __post_init__(self):
        if min(self.numbers) < 0:
            raise ValueError(f"numbers must not be negative, got {self.numbers}")


class Squaring:
    """An experiment that counts what it measures, and can be interrupted."""

    def __init__(self):
        self.measured = []
        self.interrupt_at = None
        self.experiment = Experiment(Squares, Squares(numbers=(5,)), self.points, self.measure, self.report)

    def points(self, config):
        return [{"number": number} for number in config.numbers]

    def measure(self, config, point):
        if point["number"] == self.interrupt_at:
            raise KeyboardInterrupt
        self.measured.append(point["number"])
        return {"square": point["number"] ** 2}

    def report(self, config, rows):
        figure, (ax,) = grid()
        lines(ax, {"squares": ([1, 2], [1, 4])}, xlabel="number")
        return [
            "Squares **grow**.",
            Table(rows, ("number", "square")),
            Verbatim("1 4 9", "\x1b[1m1 4 9"),
            Picture("squares", "They grow.", figure),
        ]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def squaring():
    return Squaring()


def fails(capsys, *arguments):
    """The one line with which a command ends."""
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("experiments: error: "), err
    return err


def test_list_names_every_experiment_and_imports_none():
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", "experiments", "list"], capture_output=True, text=True, cwd=ROOT)
    assert [line.split(":")[0] for line in done.stdout.splitlines()] == [*command.EXPERIMENTS, *command.TOOLS]
    assert all(line.rstrip().endswith(".") for line in done.stdout.splitlines())
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "experiments.experiment" in imported and not imported & {"jax", "numpy", "matplotlib", "tyro", "tqdm"}


ROOT = command.pathlib.Path(command.__file__).parent.parent


@pytest.mark.parametrize("name", command.EXPERIMENTS)
def test_every_experiment_is_data(name):
    experiment = command.load(command.EXPERIMENTS[name])
    assert dataclasses.is_dataclass(experiment.config) and experiment.config.__dataclass_params__.frozen
    assert isinstance(experiment.quick, experiment.config) and "seed" in {field.name for field in dataclasses.fields(experiment.config)}
    for config in (experiment.quick, experiment.config()):
        points = list(experiment.points(config))
        assert points and json.loads(json.dumps(points)) == points  # points are JSON values
        assert len({json.dumps(point, sort_keys=True) for point in points}) == len(points)


def test_an_unknown_experiment_is_one_line_that_lists_them(capsys):
    assert f"there are: {', '.join(command.EXPERIMENTS)}" in fails(capsys, "waist")


def test_unknown_overrides_and_values_that_make_no_sense(capsys):
    assert "did you mean --block-sizes?" in fails(capsys, "waste", "--blok-sizes", "8")
    assert "there are: --lengths" in fails(capsys, "waste", "--xyz", "8")
    assert "a block size must be one of 1, 2, 4, 8, 16, 32, 64, 128; got 3" in fails(capsys, "waste", "--block-sizes", "8", "3")
    assert "lengths must be one of short_chat" in fails(capsys, "waste", "--lengths", "shortchat")
    assert "Error parsing --requests: invalid literal for int() with base 10: 'many'\n" in fails(capsys, "waste", "--requests", "many")
    assert "only, got --seed" in fails(capsys, "all", "--seed")


def test_traces_that_are_not_there_or_broken_end_the_command(capsys, tmp_path):
    assert "nowhere.csv" in fails(capsys, "waste", "--lengths", "nowhere.csv")
    (tmp_path / "empty.csv").write_text("")
    assert "empty.csv has no requests" in fails(capsys, "waste", "--lengths", "empty.csv")


def test_a_run_leaves_config_rows_table_and_pictures(squaring):
    config = Squares()
    parts = runner.run("squares", squaring.experiment, config)
    folder = runner.results_folder("squares", config)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "rows.jsonl", "squares.png", "table.md"]
    assert json.loads((folder / "config.json").read_text()) == {"numbers": [1, 2, 3], "seed": 0}
    assert [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()][1] == {"number": 2, "square": 4}
    assert "| 3 | 9 |" in (folder / "table.md").read_text() and len(parts) == 4
    assert (folder / "squares.png").read_bytes().startswith(b"\x89PNG")


def test_an_interrupted_run_keeps_whole_rows_and_goes_on_from_there(squaring):
    config = Squares(numbers=(1, 2, 3, 4))
    squaring.interrupt_at = 3
    with pytest.raises(KeyboardInterrupt):
        runner.run("squares", squaring.experiment, config)
    file = runner.results_folder("squares", config) / "rows.jsonl"
    assert [json.loads(line)["number"] for line in file.read_text().splitlines()] == [1, 2]
    with open(file, "a") as rows:
        rows.write('{"number": 3, "squ')  # killed while it wrote
    squaring.interrupt_at = None
    runner.run("squares", squaring.experiment, config)
    assert squaring.measured == [1, 2, 3, 4]
    assert [json.loads(line)["square"] for line in file.read_text().splitlines()] == [1, 4, 9, 16]
    runner.run("squares", squaring.experiment, config)
    assert squaring.measured == [1, 2, 3, 4]


def test_an_interrupt_ends_the_command_with_a_word(capsys, squaring, monkeypatch):
    squaring.interrupt_at = 2
    monkeypatch.setattr(command, "load", lambda module: squaring.experiment)
    with pytest.raises(SystemExit) as stopped:
        command.main(["waste"])
    assert stopped.value.code == 130 and "the same command goes on" in capsys.readouterr().err


def test_a_report_is_made_of_rows_alone(squaring):
    config = Squares()
    with pytest.raises(ValueError, match="has no rows yet"):
        runner.report("squares", squaring.experiment, config)
    runner.run("squares", squaring.experiment, config)
    folder = runner.results_folder("squares", config)
    table = (folder / "table.md").read_bytes()
    for name in ("table.md", "squares.png"):
        (folder / name).unlink()
    runner.report("squares", squaring.experiment, config)
    assert (folder / "table.md").read_bytes() == table and (folder / "squares.png").exists()
    assert squaring.measured == [1, 2, 3]


def test_a_folder_belongs_to_one_configuration(squaring):
    one, two = (runner.results_folder("squares", Squares(seed=seed)) for seed in (0, 1))
    assert one != two and runner.results_folder("squares", Squares()) == one
    (one / "config.json").write_text((two / "config.json").read_text())
    with pytest.raises(ValueError, match="holds the results of another configuration"):
        runner.run("squares", squaring.experiment, Squares())


def test_rows_that_are_none_name_their_line(squaring):
    folder = runner.results_folder("squares", Squares())
    (folder / "rows.jsonl").write_text('{"number": 1, "square": 1}\n[]\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: not a row"):
        runner.run("squares", squaring.experiment, Squares())


def test_quick_and_overrides_make_the_configuration(squaring):
    def parsed(*arguments):
        return commands.parse("squares", squaring.experiment, arguments)

    assert parsed() == (Squares(), runner.run)
    assert parsed("--quick", "--seed", "3") == (Squares(numbers=(5,), seed=3), runner.run)
    assert parsed("--numbers", "7", "8", "--report") == (Squares(numbers=(7, 8)), runner.report)
    with pytest.raises(ValueError, match="must not be negative"):
        parsed("--numbers", "-1")


def test_parts_as_text_and_html(squaring, tmp_path):
    runner.run("squares", squaring.experiment, Squares())
    parts = squaring.report(Squares(), [{"number": 1234.5678, "square": 0.12345}, {"number": "x"}])
    assert "| number | square |\n| --- | --- |\n| 1235 | 0.123 |\n| x |  |\n" in markdown(parts)
    assert "![They grow.](up/squares.png)" in markdown(parts, "up/")
    assert "number  square\n  1235   0.123\n" in terminal(parts, colours=False)
    assert "\x1b" in terminal(parts, colours=True) and "\x1b" not in terminal(parts, colours=False)
    page = html_parts([*parts, "a < b"], runner.results_folder("squares", Squares()))
    assert "<strong>grow</strong>" in page and "<td>0.123</td>" in page and "a &lt; b" in page
    assert 'src="data:image/png;base64,' in page and "squares.png" not in page


def test_all_writes_one_report_of_everything(squaring, capsys, tmp_path):
    commands.run_all(
        {"squares": lambda: squaring.experiment, "waste": lambda: SMALL}, {"squares": "Squares.", "waste": "Waste."}, ["--quick"]
    )
    text, page = ((tmp_path / "results" / name).read_text() for name in ("report.md", "report.html"))
    for heading in ("squares", "waste"):
        assert f"## {heading}\n" in text and f"<h2>{heading}</h2>" in page
    assert "python -m experiments squares --quick" in text and "69.5 %" in text
    for picture in [part.split(")")[0] for part in text.split("](")[1:]]:
        assert (tmp_path / "results" / picture).is_file()
    assert page.count("<img") == text.count("![") and "http" not in page


SMALL = WASTE._replace(quick=Waste(block_sizes=(16,)))


def test_a_sweep_is_a_file_that_yields_configurations(capsys, tmp_path):
    sweep = tmp_path / "mine.py"
    sweep.write_text(
        "from experiments.waste import Waste\n\n"
        "def sweep():\n    for size in (8, 64):\n        yield Waste(lengths='short_chat', requests=50, block_sizes=(size,))\n"
    )
    command.main([str(sweep)])
    rows = [json.loads(line) for line in (tmp_path / "results/sweeps/mine/rows.jsonl").read_text().splitlines()]
    assert {tuple(row["block_sizes"]) for row in rows} == {(8,), (64,)}
    assert "block sizes" in (tmp_path / "results/sweeps/mine/table.md").read_text()
    assert len(list((tmp_path / "results/waste").iterdir())) == 2


def test_bad_sweeps(capsys, tmp_path):
    assert "there is no sweep nowhere.py" in fails(capsys, "nowhere.py")
    sweep = tmp_path / "mine.py"
    sweep.write_text("x = 1\n")
    assert "has no function sweep()" in fails(capsys, str(sweep))
    sweep.write_text("def sweep():\n    yield 3\n")
    assert "must yield configurations of" in fails(capsys, str(sweep))
    sweep.write_text("def sweep():\n    return []\n")
    assert "yields no configuration" in fails(capsys, str(sweep))
    assert "takes no overrides" in fails(capsys, str(sweep), "--seed", "1")


def test_the_sweep_of_the_docs_is_short_and_runs(capsys, tmp_path):
    text = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert code.count("\n") <= 20
    (tmp_path / "my_sweep.py").write_text(code.replace("requests=500", "requests=20"))
    command.main(["my_sweep.py"])
    rows = [json.loads(line) for line in (tmp_path / "results/sweeps/my_sweep/rows.jsonl").read_text().splitlines()]
    assert {(row["lengths"], *row["block_sizes"]) for row in rows} == {
        (name, size) for name in ("short_chat", "long_chat") for size in (4, 16, 64)
    }


def test_the_docs_name_every_experiment():
    text = (ROOT / "docs" / "experiments.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE) == list(command.EXPERIMENTS)
