"""Compiles exported graphs with libtpu's compiler. Opens no device; runs nothing.

    python -m tpu.compile FOLDER NAME TARGET    one graph, in this process

Names that jax calls private are used in this file only: a graph comes from torch_xla, so there is
no jax function to lower.
"""

import gzip
import io
import json
import os
import sys
from pathlib import Path
from time import perf_counter
from typing import Any

# Before jax is imported: look for no TPU, ask no metadata server, share the library.
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_MIN_LOG_LEVEL": "3",
    "TPU_STDERR_LOG_LEVEL": "3",
    "TF_CPP_MIN_LOG_LEVEL": "3",
}

import numpy as np
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax.experimental import topologies
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from tpu.chips import TARGETS, Target
from tpu.hbm import traffic
from tpu.hlo import Module, parse
from tpu.records import Compiled, Exported, read_exported, write_compiled
from tpu.structure import collectives, copies, host_transfers, kernels


def compile_graph(folder: Path, graph: Exported, target: Target) -> Compiled:
    """Compile one graph for one target; a refusal is an answer."""
    begin = perf_counter()
    try:
        executable = _compile((folder / f"{graph.name}.mlirbc").read_bytes(), graph, target)
    except Exception as exc:  # the compiler's refusals have no type of their own
        if "RESOURCE_EXHAUSTED" not in str(exc) and graph.expected == "compiles":
            raise
        return Compiled(graph.name, target.name, perf_counter() - begin, error=str(exc)[:600])
    seconds = perf_counter() - begin
    text = executable.hlo_modules()[0].to_string()
    with gzip.open(folder / f"{graph.name}.{target.name}.hlo.gz", "wt") as file:
        file.write(text)
    return _described(graph, target, seconds, executable, parse(text))


def _compile(bytecode: bytes, graph: Exported, target: Target) -> Any:
    context = mlir.make_ir_context()
    context.allow_unregistered_dialects = True
    with context:
        module = stablehlo.deserialize_portable_artifact(context, bytecode)
        _complete(module, graph)
        devices = tuple(_devices(target)[: graph.partitions])
        buffer = io.BytesIO()
        module.operation.write_bytecode(buffer)
        return devices[0].client.compile(
            buffer.getvalue(),
            executable_devices=xla_client.DeviceList(devices),
            compile_options=_options(graph.partitions),
        )


def _devices(target: Target) -> list[Any]:
    bounds = {"chips_per_host_bounds": [1, 1, 1]} if target.chips == 1 else {}
    described = topologies.get_topology_desc(
        platform="tpu", topology_name=f"{target.kind}:{target.topology}", **bounds
    )
    return list(described.devices)


def _options(partitions: int) -> Any:
    options = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=partitions,
        device_assignment=np.arange(partitions).reshape(1, partitions),
        backend=None,
    )
    build = options.executable_build_options
    build.use_spmd_partitioning = partitions > 1
    build.use_shardy_partitioner = False  # torch_xla marks shardings as GSPMD reads them
    return options


def _complete(module: ir.Module, graph: Exported) -> None:
    """Say which results take over whose memory, and what is cut: torch_xla's export does not."""
    main = next(
        op
        for op in module.body.operations
        if ir.StringAttr(op.attributes["sym_name"]).value == "main"
    )
    function = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    with ir.Location.unknown():
        given: list[dict[str, ir.Attribute]] = [{} for _ in function.inputs]
        returned: list[dict[str, ir.Attribute]] = [{} for _ in function.results]
        int32 = ir.IntegerType.get_signless(32)
        for parameter, result in graph.donated.items():
            given[parameter]["tf.aliasing_output"] = ir.IntegerAttr.get(int32, result)
        if graph.partitions > 1:
            for parameter, named in enumerate(given):
                how = ir.StringAttr.get(graph.shardings.get(parameter, "{replicated}"))
                named["mhlo.sharding"] = how
                if parameter in graph.donated:
                    returned[graph.donated[parameter]]["mhlo.sharding"] = how
        main.attributes["arg_attrs"] = _attributes(given)
        main.attributes["res_attrs"] = _attributes(returned)


def _attributes(named: list[dict[str, ir.Attribute]]) -> ir.ArrayAttr:
    return ir.ArrayAttr.get([ir.DictAttr.get(one) for one in named])


def _described(
    graph: Exported, target: Target, seconds: float, executable: Any, module: Module
) -> Compiled:
    memory = executable.get_compiled_memory_stats()
    moved = traffic(module, frozenset(graph.paged))
    return Compiled(
        graph.name,
        target.name,
        seconds,
        flops=executable.cost_analysis().get("flops", 0.0),
        arguments=memory.argument_size_in_bytes,
        aliased=memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        hbm_read=moved.read,
        hbm_written=moved.written,
        loops=moved.loops,
        aliases=module.aliases,
        collectives=collectives(module),
        host=host_transfers(module),
        kernels=kernels(module),
        copies=copies(module, min(graph.donated_bytes.values(), default=0)),
    )


def main() -> None:
    """Compile what the command line names; leave the record in the folder."""
    folder, name, target = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    graph = next(graph for graph in read_exported(folder) if graph.name == name)
    compiled = compile_graph(folder, graph, TARGETS[target])
    write_compiled(folder, compiled)
    json.dump({"seconds": round(compiled.seconds, 1), "error": compiled.error}, sys.stdout)


if __name__ == "__main__":
    main()
