"""Options that several commands have in common."""

from typing import Annotated

import typer

TargetOption = Annotated[str, typer.Option("--target", help="'embedded', a local folder or a Hub id.")]
DtypeOption = Annotated[str, typer.Option("--dtype", help="float32, bfloat16 or float16.")]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run code that the target's repository carries.")
]
