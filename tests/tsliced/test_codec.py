"""Values of the core to plain ones and back, as far as it is not about records or messages."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tsliced.codec import Codecs


def test_a_field_that_cannot_be_carried_is_noticed_when_the_codec_is_built() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Unfit:
        table: dict[str, int]

    # Hints of a local class are resolved here, where `dict` is known.
    with pytest.raises(TypeError, match="can hold"):
        Codecs().of(Unfit)


def test_a_union_of_several_types_is_noticed_when_the_codec_is_built() -> None:
    with pytest.raises(TypeError, match="can hold"):
        Codecs().of(int | str)
