"""What the command line hands to the shard and to the router."""

import json
import logging
import socket
import subprocess
import sys

import pytest
from loralane_router import cli
from loralane_router.logs import LineFormatter

ALL_FLAGS = [
    "--adapter", "a=org/a", "--adapter", "b=org/b@rev", "--adapter-root", "dir",
    "--adapter-ttl", "60", "--preload", "a", "--preload", "b", "--pin", "c",
    "--device", "cpu", "--dtype", "float32", "--max-model-len", "128", "--max-rows", "4",
    "--lanes", "64", "--kv-memory", "1000", "--host-cache", "2000", "--step-tokens", "16",
    "--threads", "2", "--log-format", "json",
]  # fmt: skip


def parsed(*argv: str):
    return cli._parser().parse_args(argv)


def test_flags_that_were_not_given_are_not_handed_on():
    command = cli.shard_command("shard", parsed("shard"), ["--listen=h:1"])

    assert command[1:] == ["-m", "loralane_server", "shard", "--listen=h:1", "--"]


def test_every_flag_is_handed_on_as_it_was_given():
    command = cli.shard_command("shard", parsed("serve", *ALL_FLAGS, "org/model"), [])

    given = command[command.index("shard") + 1 :]
    pairs = zip(ALL_FLAGS[::2], ALL_FLAGS[1::2], strict=True)
    assert given == [f"{flag}={value}" for flag, value in pairs] + ["--", "org/model"]


def test_a_value_that_looks_like_a_flag_stays_a_value():
    command = cli.shard_command("shard", parsed("shard", "--adapter=--x=y", "--", "-m"), [])

    assert command[-3:] == ["--adapter=--x=y", "--", "-m"]


def test_check_names_the_adapter_and_the_model():
    args = parsed("check", "org/a", "--model", "org/model", "--token", "hf_1", "--tensors")

    command = cli.shard_command("check", args, cli._own_flags(args))

    flags = ["--model=org/model", "--token=hf_1", "--tensors"]
    assert command[3:] == ["check", *flags, "--", "org/a"]


def test_the_servers_own_parser_understands_what_is_handed_on():
    server = pytest.importorskip("loralane_server.__main__")
    shard = cli.shard_command("shard", parsed("serve", *ALL_FLAGS, "org/model"), ["--listen=h:1"])
    checking = parsed("check", "org/a", "--model", "org/model", "--tensors")
    check = cli.shard_command("check", checking, cli._own_flags(checking))

    shard_args = server._parser().parse_args(shard[3:])
    check_args = server._parser().parse_args(check[3:])

    assert (shard_args.model, shard_args.listen, shard_args.lanes) == ("org/model", "h:1", 64)
    assert shard_args.adapter == ["a=org/a", "b=org/b@rev"]
    assert (shard_args.adapter_ttl, shard_args.preload, shard_args.pin) == (60, ["a", "b"], ["c"])
    assert (check_args.reference, check_args.model) == ("org/a", "org/model")
    assert check_args.tensors


def test_the_routers_settings_come_from_its_flags():
    args = parsed(
        "router", "--shard", "h:8101", "--host", "::1", "--port", "0", "--grpc-port", "9000",
        "--max-queue", "5", "--max-queue-tokens", "900",
        "--served-model-name", "m", "--log-format", "json",
    )  # fmt: skip

    config = cli.router_config(args, tuple(args.shard))

    assert (config.shards, config.host, config.port) == (("h:8101",), "::1", 0)
    assert (config.grpc_port, config.max_queue, config.max_queue_tokens) == (9000, 5, 900)
    assert (config.served_model_name, config.log_format) == ("m", "json")


def test_a_router_takes_many_shards_and_names_of_many(tmp_path):
    weights = tmp_path / "weights.json"
    weights.write_text('{"adapters": {"gold": 2}, "keys": {"secret": 3}}')
    shards = ["h:8101", "unix:/run/shard", "dns:shards.internal:8101"]
    flags = [f"--shard={shard}" for shard in shards]

    args = parsed("router", *flags, "--weights", str(weights))
    config = cli.router_config(args, tuple(args.shard))

    assert config.shards == tuple(shards)
    assert config.weights.adapters == {"gold": 2.0}
    assert "secret" not in repr(config)


@pytest.mark.parametrize(
    "argv",
    [
        ["router", "--shard", "nowhere"],
        ["router", "--shard", "h:1", "--port", "70000"],
        ["router", "--shard", "h:1", "--weights", "/no/such/file"],
    ],
)
def test_settings_that_cannot_work_are_told_in_one_line(argv, capsys):
    status = cli.main(argv)

    assert status == 2
    assert capsys.readouterr().err.startswith("loralane: ")


def test_a_port_that_is_taken_is_told_in_one_line(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        status = cli.main(["router", "--shard", "127.0.0.1:1", "--port", str(port)])

    assert status == 2
    assert f"127.0.0.1:{port}" in capsys.readouterr().err


def test_the_module_runs_as_the_command_does():
    done = subprocess.run(
        [sys.executable, "-m", "loralane_router", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )

    assert "serve" in done.stdout


def test_the_router_imports_neither_torch_nor_the_server():
    code = (
        "import sys, loralane_router.cli; "
        "sys.exit(any(m.split('.')[0] in ('torch', 'loralane_server') for m in sys.modules))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_log_record_is_one_line_of_text_or_one_json_object():
    record = logging.LogRecord("name", logging.WARNING, "path", 1, "a %s", ("b\nc",), None)

    text = LineFormatter("text").format(record)
    machine = json.loads(LineFormatter("json").format(record))

    assert text.split()[1:3] == ["warning", "a"]
    assert "\n" not in LineFormatter("json").format(record)
    assert (machine["level"], machine["logger"], machine["message"]) == (
        "warning",
        "name",
        "a b\nc",
    )
