"""Tunix's Role, which has a member for the rollout, and the device mesh of each role, which has one device."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Annotated, Any

from pydantic import BeforeValidator

from whet.errors import ConfigError, format_value, lookup_error

__all__ = ["Meshes", "Role", "check_meshes"]

_RULE = "a mesh is torch's DeviceMesh of one device, e.g. init_device_mesh('cuda', (1,))"
_FIX = "leave role_to_mesh out: a GPU is taken if there is one"


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
    """The mesh of each role that has one.

    Args: role_to_mesh: a mapping from roles, or their names, to meshes or None; None = no meshes.
    Raises: ConfigError: it is not a mapping, a role is unknown, or a mesh is not a DeviceMesh of one device.

    >>> check_meshes({"actor": None}), check_meshes(None)
    ({}, {})
    >>> check_meshes({"actor": "cuda"})
    Traceback (most recent call last):
    whet.errors.ConfigError: the mesh of actor is 'cuda' (str); a mesh is torch's DeviceMesh of one device, e.g. \
init_device_mesh('cuda', (1,)); leave role_to_mesh out: a GPU is taken if there is one
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
    """Raises ConfigError for anything but None or a mesh of one device."""
    if mesh is None:
        return
    if not hasattr(mesh, "device_type"):
        kind = f"{type(mesh).__module__}.{type(mesh).__name__}".removeprefix("builtins.")
        raise ConfigError(f"{name} is {format_value(mesh, 80)} ({kind}); {_RULE}; {_FIX}")
    if callable(vars(type(mesh)).get("size")) and mesh.size() != 1:
        raise ConfigError(f"{name} has {mesh.size()} devices, and one process trains on one; {_RULE}; {_FIX}")


Meshes = Annotated[dict[Role, Any], BeforeValidator(check_meshes)]
"""The device mesh of each role."""
