"""The run file: what is wrong in it is named, with what would be right; values keep their types; paths belong to the file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

from eyas.config import SECTIONS, load, reference
from eyas.errors import UserError, nearest


@pytest.fixture
def refused(tmp_path: Path) -> Callable[..., str]:
    """refused(text, overrides) loads the text as a run file and returns the sentence with which it is refused."""

    def check(text: str, overrides: list[str] | None = None) -> str:
        path = tmp_path / "run.toml"
        path.write_text(text)
        with pytest.raises(UserError) as caught:
            load(path, overrides or [])
        assert "\n" not in str(caught.value)
        return str(caught.value)

    return check


GOOD = '[target]\npath = "model"\n[data]\nconversations = ["data.jsonl"]\n'


def write(tmp_path: Path, text: str = GOOD) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def test_an_unknown_key_names_the_nearest_key_and_all_keys_of_the_section(refused: Callable[..., str]) -> None:
    message = refused(GOOD + "[train]\nepoch = 3\n")
    assert "train.epoch" in message and "did you mean epochs?" in message and "unroll_steps" in message


def test_a_key_unlike_any_other_gets_no_guess(refused: Callable[..., str]) -> None:
    message = refused(GOOD + "[train]\nzzzzqqqq = 3\n")
    assert "train.zzzzqqqq" in message and "did you mean" not in message


def test_an_unknown_section_names_the_nearest_section(refused: Callable[..., str]) -> None:
    message = refused(GOOD + "[feature]\nlayers = [1, 2, 3]\n")
    assert "[feature]" in message and "did you mean features?" in message


def test_a_key_in_the_wrong_section_names_the_right_one(refused: Callable[..., str]) -> None:
    assert "did you mean data.max_length?" in refused(GOOD + "[train]\nmax_length = 100\n")


def test_a_key_outside_every_section_names_its_section(refused: Callable[..., str]) -> None:
    assert "did you mean [train] lr?" in refused("lr = 1e-3\n" + GOOD)


def test_a_section_written_as_a_value_is_refused(refused: Callable[..., str]) -> None:
    assert "[train]" in refused("train = 3\n" + GOOD)


@pytest.mark.parametrize(
    ("section", "line", "name"),
    [
        ("train", 'lr = "fast"', "train.lr"),
        ("train", "epochs = 1.5", "train.epochs"),
        ("train", "epochs = true", "train.epochs"),
        ("train", "epochs = 0", "train.epochs"),
        ("train", "lr = -1.0", "train.lr"),
        ("train", "lr = nan", "train.lr"),
        ("features", 'layers = "2, 3"', "features.layers"),
        ("features", "layers = [1, 2.5, 3]", "features.layers"),
        ("features", 'dtype = "float16"', "features.dtype"),
        ("run", "seed = -1", "run.seed"),
        ("run", "seed = 99999999999999999999999", "run.seed"),
        ("draft", "fc_norm = 1", "draft.fc_norm"),
    ],
)
def test_a_value_of_the_wrong_type_or_range_is_named_with_its_key(refused: Callable[..., str], section: str, line: str, name: str) -> None:
    message = refused(GOOD + f"[{section}]\n{line}\n")
    assert name in message and "cannot be used" in message


def test_a_missing_key_and_a_missing_section_are_named(refused: Callable[..., str]) -> None:
    assert "target.path is missing. Add path = ... under [target]." in refused('[target]\n[data]\nconversations = ["x"]\n')
    assert "section [data] is missing" in refused('[target]\npath = "x"\n')


def test_a_frozen_head_of_noise_is_refused(refused: Callable[..., str]) -> None:
    message = refused(GOOD + '[draft]\ninit_head = "random"\n[train]\nfreeze_head = true\n')
    assert "train.freeze_head" in message and 'draft.init_head = "target"' in message


def test_an_empty_list_of_conversations_is_refused(refused: Callable[..., str]) -> None:
    assert "data.conversations" in refused('[target]\npath = "x"\n[data]\nconversations = []\n')


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.epochs=3", 3),
        ("train.lr=1e-4", 1e-4),
        ("train.lr=1", 1.0),
        ("draft.fc_norm=false", False),
        ("features.layers=[1, 2, 4]", [1, 2, 4]),
        ("target.device=cpu", "cpu"),
        ('target.device="cuda:1"', "cuda:1"),
        ("target.device=cuda:1", "cuda:1"),
        (" train.epochs = 5 ", 5),
    ],
)
def test_set_takes_toml_values_and_bare_words(tmp_path: Path, override: str, value: Any) -> None:
    config = load(write(tmp_path), [override])
    section, key = override.split("=")[0].strip().split(".")
    found = getattr(getattr(config, section), key)
    assert found == value and type(found) is type(value)


def test_set_wins_over_the_file_and_the_last_set_wins(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "[train]\nepochs = 7\n")
    assert load(path, []).train.epochs == 7
    assert load(path, ["train.epochs=8", "train.epochs=9"]).train.epochs == 9


def test_set_is_checked_like_the_file(refused: Callable[..., str]) -> None:
    assert "did you mean epochs?" in refused(GOOD, ["train.epoch=3"])
    assert "train.lr" in refused(GOOD, ["train.lr=fast"])


@pytest.mark.parametrize("override", ["train.lr", "lr=3", "train.=3", ".lr=3", "=3", ""])
def test_a_malformed_set_shows_how_to_write_it(refused: Callable[..., str], override: str) -> None:
    assert "--set train.lr=1e-4" in refused(GOOD, [override])


def test_what_is_not_toml_is_refused_with_the_line(refused: Callable[..., str]) -> None:
    message = refused("[target\npath = 3\n")
    assert "not valid TOML" in message and "line 1" in message


def test_what_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(UserError, match="cannot be read as text"):
        load(path, [])


def test_a_folder_and_a_missing_file_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder"):
        load(tmp_path, [])
    with pytest.raises(UserError, match="does not exist"):
        load(tmp_path / "none.toml", [])
    with pytest.raises(UserError, match=r"run\.toml"):
        load(write(tmp_path) / "below.toml", [])


def test_paths_are_relative_to_the_run_file_not_to_the_working_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "deep" / "er"
    folder.mkdir(parents=True)
    path = write(folder, '[target]\npath = "../model"\n[data]\nconversations = ["a.jsonl", "/b.jsonl"]\n[evaluate]\nprompts = ["p.jsonl"]\n')
    monkeypatch.chdir(tmp_path)
    config = load(Path("deep/er/run.toml"), [])
    assert config.target.path == str(tmp_path / "deep" / "model")
    assert config.data.conversations == [str(folder / "a.jsonl"), "/b.jsonl"]
    assert config.evaluate.prompts == [str(folder / "p.jsonl")]
    assert config.run.folder == str(folder / "runs" / "run"), "the run folder is named after the run file and lies beside it"
    assert load(path, ["run.folder=else"]).run.folder == str(folder / "else")


def test_a_loaded_config_cannot_be_changed(tmp_path: Path) -> None:
    config = load(write(tmp_path), [])
    with pytest.raises(ValueError, match="frozen"):
        config.train.lr = 3.0  # type: ignore[misc]


def test_the_page_of_keys_is_the_one_made_from_the_code() -> None:
    page = ROOT / "docs" / "run-file.md"
    assert page.read_text() == reference() + "\n", "run `PYTHONPATH=src .venv/bin/python -m eyas.config > docs/run-file.md`"


def test_the_page_names_every_key_with_a_meaning() -> None:
    text = reference()
    for section, model in SECTIONS.items():
        assert f"## [{section}]" in text and model.__doc__
        for key, field in model.model_fields.items():
            assert f"| `{key}` |" in text and field.description, key


def test_nearest_gives_the_likely_misspelling_or_nothing() -> None:
    assert nearest("epoch", ["epochs", "lr"]) == "epochs"
    assert nearest("qqqq", ["epochs", "lr"]) is None


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ('{ path = "a.jsonl", shre = 0.5 }', "there is no key data.conversations.0.shre; did you mean share?"),
        ('{ path = "a.jsonl", share = 2.0 }', "data.conversations.0.share = 2.0 cannot be used"),
        ("7", "data.conversations.0 = 7 cannot be used"),
        ('{ path = "a.jsonl", hub = "b" }', "both path and hub"),
        ("{ cap = 5 }", "neither path nor hub"),
    ],
)
def test_what_is_wrong_in_a_table_of_conversations_is_named(tmp_path: Path, entry: str, says: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'[target]\npath = "t"\n[data]\nconversations = [{entry}]\n')
    with pytest.raises(UserError) as caught:
        load(path, [])
    assert says in str(caught.value)
