"""Tunix's Role, which has a member for the rollout, and the device mesh of each role.

All roles share the processes of torchrun, each with one device, and every model is sharded over all of them. So a mesh
is only checked: its axes must be of data (fsdp, dp), and have as many devices together as there are processes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any

from pydantic import BeforeValidator

from whet.errors import ConfigError, format_value, lookup_error
from whet.parallel.torchrun_env import world_size

__all__ = ["Meshes", "Role", "check_meshes"]

_RULE = "a mesh is a torch DeviceMesh, a jax Mesh, a dict of sizes ({'fsdp': 2}), or sizes and names ((2,), ('fsdp',))"
_FIX = "leave role_to_mesh out: whet shards over all processes"
_DATA_AXES = ("data", "ddp", "dp", "fsdp", "replica")
"""Names of axes over which whet can share a batch: it shards the models over all of them."""


class Role(str, Enum):  # noqa: UP042 - as whet.config.Role, whose members equal these
    """The role of a model, or the rollout.

    >>> Role("actor"), Role.ROLLOUT.value
    (<Role.ACTOR: 'actor'>, 'rollout')
    """

    ACTOR = "actor"
    CRITIC = "critic"
    REFERENCE = "reference"
    REWARD = "reward"
    ROLLOUT = "rollout"
    TEACHER = "teacher"


def check_meshes(role_to_mesh: Any) -> dict[Role, Any]:
    """Returns the mesh of each role that has one.

    Args: role_to_mesh: a mapping from roles, or their names, to meshes or None; None = no meshes.
    Raises: ConfigError: it is not a mapping, a role is unknown, a value is no mesh, or the processes can't be it.

    >>> check_meshes({"actor": None}), check_meshes({"actor": {"fsdp": 1}})
    ({}, {<Role.ACTOR: 'actor'>: {'fsdp': 1}})
    >>> check_meshes({"actor": ((1, 4), ("fsdp", "tp"))})
    Traceback (most recent call last):
    whet.errors.ConfigError: the mesh of actor is fsdp=1 x tp=4 = 4 devices, and a mesh here has axes of data alone, \
without tp; make it fsdp=4 (and set tensor_parallel_size of training_config to divide matrices), or leave role_to_mesh \
out: whet shards over all processes
    """
    if role_to_mesh is None:
        return {}
    if not isinstance(role_to_mesh, Mapping):
        kind = type(role_to_mesh).__name__
        raise ConfigError(
            f"the meshes are {format_value(role_to_mesh, 80)} ({kind}), and must be a dict of Role to mesh; {_RULE}; "
            f"{_FIX}"
        )
    roles = [role.value for role in Role]
    if unknown := [key for key in role_to_mesh if key not in roles]:
        raise lookup_error("role of a mesh", unknown[0], roles)
    for role, mesh in role_to_mesh.items():
        _check(f"the mesh of {Role(role).value}", mesh)
    return {Role(role): mesh for role, mesh in role_to_mesh.items() if mesh is not None}


def _check(name: str, mesh: Any) -> None:
    """Raises ConfigError for anything but None or a mesh of torchrun's processes."""
    if mesh is None:
        return
    sizes = _axis_sizes(mesh)
    if sizes is None:
        kind = f"{type(mesh).__module__}.{type(mesh).__name__}".removeprefix("builtins.")
        raise ConfigError(f"{name} is {format_value(mesh, 80)} ({kind}); {_RULE}; {_FIX}")
    count, processes = math.prod(sizes.values()), world_size()
    shown = f"{name} is {' x '.join(f'{axis}={size}' for axis, size in sizes.items())} = {count} devices"
    if other := [axis for axis, size in sizes.items() if axis not in _DATA_AXES and size != 1]:
        raise ConfigError(
            f"{shown}, and a mesh here has axes of data alone, without {', '.join(other)}; make it fsdp={count} (and "
            f"set tensor_parallel_size of training_config to divide matrices), or {_FIX}"
        )
    if count != processes:
        raise ConfigError(
            f"{shown}, and torchrun has started {processes} process(es) with one device each; start torchrun "
            f"--nproc_per_node={count}, or {_FIX}"
        )


def _axis_sizes(mesh: Any) -> dict[str, int] | None:
    """Returns the size of each axis of a mesh; None = it is no mesh. An axis without a name counts as one of data.

    >>> _axis_sizes(((2, 1), ("fsdp", "tp")))
    {'fsdp': 2, 'tp': 1}
    """
    if isinstance(mesh, Mapping):
        sizes: Any = mesh
    elif isinstance(mesh, tuple | list):
        if len(mesh) != 2 or any(not isinstance(part, tuple | list) for part in mesh) or len(mesh[0]) != len(mesh[1]):
            return None
        sizes = dict(zip(mesh[1], mesh[0], strict=True))
    elif isinstance(shape := getattr(mesh, "shape", None), Mapping):  # jax's
        sizes = shape
    elif hasattr(mesh, "device_type"):
        names = mesh.mesh_dim_names or _DATA_AXES[: len(mesh.shape)]
        sizes = dict(zip(names, mesh.shape, strict=True))
    else:
        return None
    valid = all(isinstance(axis, str) and type(size) is int and size > 0 for axis, size in sizes.items())
    return dict(sizes) if valid and sizes else None


Meshes = Annotated[dict[Role, Any], BeforeValidator(check_meshes)]
"""The device mesh of each role."""
