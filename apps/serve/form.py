"""What form a request wants its answer in: OpenAI's `response_format`, and the fields of vLLM's clients, as one constraint."""

from dataclasses import dataclass
from typing import Any

from mmsdk.apps.serve.refusal import RefusedError, refused
from mmsdk.apps.serve.wire import ChatRequest
from mmsdk.errors import InputError, MmsdkError, ModelError
from mmsdk.generate.constrain import ANY, COSTLY, FREE, Constraint, Guide, LostError, guide_of
from mmsdk.models.types import VLM

__all__ = ["Form", "form_of", "formed"]

OBJECT = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Form:
    """What each of the answers of a request is to be, a guide for each of them, and the field that asked for it."""

    constraint: Constraint
    guides: tuple[Guide, ...]
    field: str = ""

    @staticmethod
    def free(answers: int) -> "Form":
        """None: so many answers may be anything."""
        return Form(ANY, (FREE,) * answers)

    def refused(self, error: MmsdkError) -> RefusedError:
        """An error of the engine's: one of the form is told by the field of the request, not by what the engine calls it."""
        if isinstance(error, InputError) and self.field and error.item == self.constraint.kind:
            return _wrong(self.field, error)
        return refused(error)


def formed(request: ChatRequest) -> bool:
    """Whether a request wants its answers in a form. Raises RefusedError for fields that contradict one another."""
    return bool(_found(request))


def form_of(request: ChatRequest, answers: int, vlm: VLM, tenant: str) -> Form:
    """The constraint of a request that is `formed`, compiled here, where no other tenant waits, with a guide for each of so many answers.

    Raises RefusedError, naming the field, for more than one form, and for one that cannot be followed.
    """
    (place, setting, value), *others = found = _found(request)
    if others:
        told = ", ".join(one for one, _, _ in found)
        raise RefusedError(400, f"an answer has one form, and these were given together: {told}", "invalid_value", others[0][0])
    try:
        constraint = Constraint.of(**{setting: value})
        how = vlm.tokenizer, vlm.stop_ids, vlm.decoder.config.vocabulary, tenant
        return Form(constraint, tuple(guide_of(constraint, *how) for _ in range(answers)), place)
    except InputError as error:
        raise _wrong(place, error) from None
    except LostError as error:
        raise refused(error) from None
    except ModelError as error:
        raise RefusedError(400, f"{place}: {error}", "unsupported", place) from None


def _wrong(place: str, error: InputError) -> RefusedError:
    code = "form_too_costly" if error.message.startswith(COSTLY) else "invalid_value"
    return RefusedError(400, f"{place}: {error.message}", code, place)


def _found(request: ChatRequest) -> list[tuple[str, str, Any]]:
    """Every form that is asked for: the field that does so, the setting of `Constraint.of`, and its value."""
    found: list[tuple[str, str, Any]] = []
    wanted, other = request.response_format, request.structured_outputs
    if wanted is not None and (wanted.type == "json_schema") != (wanted.json_schema is not None):
        told = "response_format.json_schema goes with the type json_schema, and with no other"
        raise RefusedError(400, told, "invalid_value", "response_format.json_schema")
    if wanted is not None and wanted.type != "text":
        schema = OBJECT if wanted.json_schema is None else wanted.json_schema.form or {}
        found.append(("response_format" if wanted.json_schema is None else "response_format.json_schema.schema", "schema", schema))
    if other is not None:
        given: dict[str, tuple[str, Any]] = {
            "json": ("schema", other.form),
            "regex": ("regex", other.regex),
            "choice": ("choice", other.choice),
            "json_object": ("schema", OBJECT if other.json_object else None),
        }
        found += [(f"structured_outputs.{name}", *one) for name, one in given.items() if one[1] is not None]
    guided: dict[str, tuple[str, Any]] = {
        "guided_json": ("schema", request.guided_json),
        "guided_regex": ("regex", request.guided_regex),
        "guided_choice": ("choice", request.guided_choice),
    }
    return found + [(name, *one) for name, one in guided.items() if one[1] is not None]
