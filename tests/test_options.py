"""Settings from four sources: which wins, and that no mistake passes in silence."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from app import options
from app.errors import ConfigError
from app.options import option, parse, switch
from app.settings import ALL_SETTINGS, CommonSettings, ServeSettings, WorkerSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(CommonSettings):
    size: int = option(3, "-s", "--size", convert=options.integer(0, 10), help="", panel="")
    names: tuple[str, ...] = option((), "--names", convert=options.words, help="", panel="")
    keep: bool = switch(True, "--keep", off_flag="--no-keep", help="", panel="")


def sample(flags: dict[str, str] | None = None, environ: dict[str, str] | None = None) -> Sample:
    return parse(Sample, flags or {}, table="sample", known=ALL_SETTINGS, environ=environ or {})


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tandem.toml"
    path.write_text('[sample]\nsize = 7\nnames = ["a", "b"]\nkeep = false\n[serve]\nport = 1\n')
    return path


def test_defaults() -> None:
    assert sample() == Sample(size=3, names=(), keep=True)


def test_the_nearest_source_wins(file: Path) -> None:
    from_file = {"config": str(file)}
    assert sample(from_file) == Sample(size=7, names=("a", "b"), keep=False, config=file)
    assert sample(from_file, {"TANDEM_SIZE": "5"}).size == 5
    assert sample(from_file | {"size": "4"}, {"TANDEM_SIZE": "5"}).size == 4


def test_the_file_may_be_named_by_the_environment(file: Path) -> None:
    assert sample(environ={"TANDEM_CONFIG": str(file)}).size == 7


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({"size": "x"}, {}, "--size: 'x' is not a whole number"),
        ({"size": "11"}, {}, "--size: 11 is out of range; it must be between 0 and 10"),
        ({}, {"TANDEM_SIZE": ""}, "TANDEM_SIZE: '' is not a whole number"),
        ({}, {"TANDEM_KEEP": "maybe"}, "TANDEM_KEEP: 'maybe' is neither true nor false"),
        ({}, {"TANDEM_SIZ": "1"}, "the environment sets TANDEM_SIZ, which is no setting"),
        ({"names": "a,,b"}, {}, "--names: 'a,,b' has an empty part"),
        ({"config": "/nonexistent"}, {}, "--config: there is no file /nonexistent"),
    ],
)
def test_mistakes_name_their_source(flags: dict[str, str], environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        sample(flags, environ)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[sample]\nsiz = 1", "'siz' is no setting of `tandem sample`"),
        ("[sample]\nsize = 'x'", "size: 'x' is not a whole number"),
        ("sample = 1", "[sample] must be a table"),
        ("[sample", "cannot read the settings file"),
        ("\udcff", "cannot read the settings file"),
    ],
)
def test_mistakes_in_the_file(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError) as caught:
        sample({"config": str(path)})
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_variables_of_the_other_commands_are_known_but_not_taken() -> None:
    environ = {"TANDEM_CTX_SIZE": "4096", "TANDEM_THREADS": "3"}
    settings = parse(WorkerSettings, {}, table="worker", known=ALL_SETTINGS, environ=environ)
    assert settings == WorkerSettings(threads=3)


@pytest.mark.parametrize("settings_class", ALL_SETTINGS)
def test_flags_and_variables_are_unique_within_a_command(settings_class: type) -> None:
    made = options.options_of(settings_class)
    flags = [flag for item in made for flag in (*item.flags, item.off_flag) if flag]
    assert len(set(flags)) == len(flags)
    assert len({item.variable for item in made}) == len(made)


@pytest.mark.parametrize(
    ("convert", "value", "expected"),
    [
        (options.endpoints, "a:1,[::1]:65535", ("a:1", "[::1]:65535")),
        (options.numbers, "3,1", (3.0, 1.0)),
        (options.words, " a, b ", ("a", "b")),
        (options.boolean, "ON", True),
        (options.real(0, 1), "0.5", 0.5),
        (options.integer(-1), "-1", -1),
        (options.size("g"), "32", 32 << 30),
        (options.size("g"), ".5", 512 << 20),
        (options.size("m"), "1.5GiB", 1536 << 20),
        (options.size("m"), "2k", 2048),
        (options.choice("a", "b"), "b", "b"),
    ],
)
def test_values(convert: options.Convert, value: str, expected: object) -> None:
    assert convert(value) == expected


@pytest.mark.parametrize(
    ("convert", "value"),
    [
        (options.endpoints, "a"),
        (options.endpoints, "a:0"),
        (options.endpoints, "a:65536"),
        (options.endpoints, "a:1,a:1"),
        (options.endpoints, "::1:5"),
        (options.endpoints, ":5"),
        (options.numbers, "0,0"),
        (options.numbers, "-1,2"),
        (options.numbers, "nan"),
        (options.numbers, "inf,1"),
        (options.numbers, ""),
        (options.real(0), "nan"),
        (options.real(0), "inf"),
        (options.real(0, 1), "1.01"),
        (options.integer(0), "1.0"),
        (options.choice("a", refused={"c": "is not offered"}), "c"),
        (options.text, " "),
        (options.size("g"), "0"),
        (options.size("g"), "-1"),
        (options.size("g"), "1.5.2"),
        (options.size("g"), "3 B"),
        (options.size("g"), "nan"),
    ],
)
def test_values_that_are_refused(convert: options.Convert, value: str) -> None:
    with pytest.raises(ValueError, match="."):
        convert(value)


def serve(**flags: str) -> ServeSettings:
    return parse(ServeSettings, flags, table="serve", environ={})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"model": "a", "hf_repo": "b/c"}, "--model and --hf-repo"),
        ({"ubatch_size": "4096"}, "--ubatch-size 4096 is above --batch-size 2048"),
        ({"split_mode": "row"}, "'row' is not offered; use layer or none"),
        ({"split_mode": "none", "tensor_split": "1,1"}, "--tensor-split needs --split-mode layer"),
        ({"device": "CPU,RPC0", "tensor_split": "1,1,1"}, "--tensor-split has 3 proportions for 2 devices"),
        ({"cache_type_k": "q2_k"}, "--cache-type-k: 'q2_k' is unknown"),
        ({"flash_attn": "off"}, "--flash-attn: 'off' is not offered"),
    ],
)
def test_combinations_that_make_no_sense(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(**flags)
    assert message in str(caught.value)


def test_the_model_of_serve() -> None:
    assert serve().model_reference is None
    assert serve(model="x.gguf").model_reference == "x.gguf"
    assert serve(hf_repo="o/r:Q8_0").model_reference == "hf:o/r:Q8_0"


def test_keys_from_both_places(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n")
    assert serve(api_key="zero", api_key_file=str(file)).api_keys() == ("zero", "one", "two")
    file.write_text("\n")
    with pytest.raises(ConfigError, match="holds no key"):
        serve(api_key_file=str(file)).api_keys()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("[sampel]\nsize = 1\n", r"\[sampel\] is no command's table"),
        ("size = 1\n", "'size' stands outside a command's table"),
        ("[sample]\nno-such = 1\n", "'no-such' is no setting"),
        ("[serve]\nctx-size = 1\nctx_size = 2\n[sample]\nsize = 1\n", ""),
        ("[sample]\nnames = " + "[" * 5000 + "\n", "cannot read"),
    ],
)
def test_a_file_with_a_mistake_is_refused(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(content)
    if not says:  # another command's table is not this command's business
        assert sample({"config": str(path)}).size == 1
        return
    with pytest.raises(ConfigError, match=says):
        sample({"config": str(path)})


def test_a_setting_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "twice.toml"
    path.write_text("[serve]\nctx-size = 1\nctx_size = 2\n")
    with pytest.raises(ConfigError, match="'ctx-size' is set twice"):
        parse(ServeSettings, {"config": str(path)}, table="serve", environ={})


@pytest.mark.parametrize("value", ["0", "1025", "100000"])
def test_absurd_numbers_of_threads_are_refused(value: str) -> None:
    with pytest.raises(ConfigError, match="between 1 and 1024"):
        parse(ServeSettings, {"threads": value}, table="serve", environ={})
