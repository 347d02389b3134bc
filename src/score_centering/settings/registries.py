"""Names that other rooms register, read from their source: importing those rooms takes seconds of torch."""

import ast
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]


@cache
def registered(module: str, table: str) -> tuple[str, ...]:
    """Keys of the dictionary `table` that is written out in the package's file `module`, in their order."""
    for node in ast.parse((PACKAGE / module).read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == table for target in targets):
            assert isinstance(node.value, ast.Dict)
            return tuple(ast.literal_eval(key) for key in node.value.keys)
    raise LookupError(f"{module} holds no table {table}")


def weight_names() -> tuple[str, ...]:
    """Allowed values of `score_centering.is_mode`."""
    return registered("objectives/weights.py", "WEIGHTS")


def model_types() -> tuple[str, ...]:
    """`model_type` of the models that the local engine computes."""
    return registered("rollout/local/architecture.py", "FAMILIES")
