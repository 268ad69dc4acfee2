"""Compiles the serving graphs for TPUs without one: `make tpu-check`.

    export     traces the shard's own graphs at the shapes of real models   (.venv-xla)
    compile    compiles them with libtpu for v5e and v6e                    (.venv-tpu)
    hlo, hbm   read what the compiler made of them
    gates      what must hold
    check      all of it, and the table in RESULTS.md

Nothing runs on a TPU, and nothing here says how fast one would be.
"""
