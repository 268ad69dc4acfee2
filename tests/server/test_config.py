from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from loralane_server import config
from loralane_server.adapters.sources.references import S3Root
from loralane_server.config import ShardConfig

S3 = S3Root("bucket", "adapters")


def test_roots_are_folders_and_prefixes(tmp_path: Path) -> None:
    assert ShardConfig(adapter_roots=(S3, tmp_path)).uses_s3
    assert not ShardConfig(adapter_roots=(tmp_path,)).uses_s3


def test_a_folder_that_is_missing_is_refused_by_its_flag(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--adapter-root .*nowhere: there is no such folder"):
        ShardConfig(adapter_roots=(tmp_path / "nowhere",))


@pytest.mark.parametrize(
    "settings", [{"adapter_roots": (S3,)}, {"adapters": (("mine", "s3://bucket/a"),)}]
)
def test_without_boto3_s3_is_refused_with_what_to_install(
    settings: dict[str, tuple[object, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_installed(name: str) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(config, "find_spec", not_installed)

    with pytest.raises(ValueError, match=r"boto3: pip install 'loralane\[s3\]'"):
        ShardConfig(**settings)  # type: ignore[arg-type]
    ShardConfig()
