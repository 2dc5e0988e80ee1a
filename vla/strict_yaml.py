"""YAML by PyYAML's safe loader, and strictly: of two equal keys PyYAML lets the last win, here they are an error."""

from typing import Any

import yaml

from mmsdk.errors import InputError

__all__ = ["read_yaml"]


def read_yaml(text: str, item: str) -> object:
    """What YAML text holds. Raises InputError, naming `item`, for what is no YAML, and a key that stands twice in one mapping."""
    try:
        _check_keys(yaml.compose(text, Loader=yaml.SafeLoader), set(), item)
        tree: object = yaml.safe_load(text)
    except InputError:
        raise
    except yaml.YAMLError as error:
        raise InputError(f"not YAML: {' '.join(str(error).split())}", item=item) from None
    except RecursionError:
        raise InputError("not YAML: it is nested too deeply", item=item) from None
    except (ValueError, LookupError, AttributeError) as error:
        # from inside PyYAML, of a value that is none of its tag's: a 13th month, !!float abc, !!bool maybe
        raise InputError(f"not YAML: a value that cannot be read: {error}", item=item) from None
    return tree


def _check_keys(node: Any, seen: set[int], item: str) -> None:
    """`seen` are nodes that were looked at: an alias may lead back."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for entry in node.value:
            _check_keys(entry, seen, item)
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        twice = sorted({str(key) for key in keys if keys.count(key) > 1})
        if twice:
            raise InputError(f"{', '.join(map(repr, twice))} stands there twice, at line {node.start_mark.line + 1}", item=item)
        for _, value in node.value:
            _check_keys(value, seen, item)
