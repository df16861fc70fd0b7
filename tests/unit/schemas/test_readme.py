"""The reader in `rlstreams/schemas/README.md` reads what we write, with fastavro alone."""

from __future__ import annotations

from functools import cache

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlstreams.schemas import encode
from rlstreams.schemas.avro import FOLDER
from tests.factories import one_of_each
from tests.newer_release import newer_text, newer_value
from tests.plain_events import to_plain
from tests.random_sessions import played
from tests.readme_blocks import schemas_page


def test_every_event_is_read():
    page = schemas_page()
    schemas = page["load_schemas"](FOLDER)
    for name, event in one_of_each().items():
        expected = (f"rlstreams.{name}", to_plain(event))
        assert expected == page["read_event"](b"".join(encode(event)), schemas)


def test_an_event_of_a_newer_release_is_read():
    """With the texts that the topic `schemas` holds."""
    page = schemas_page()
    schemas = page["load_schemas"](FOLDER, [newer_text("Prompt")])
    event = one_of_each()["Prompt"]
    expected = ("rlstreams.Prompt", to_plain(event) | {"mood": "bright"})
    assert expected == page["read_event"](newer_value(event), schemas)


def test_split_records_are_joined():
    """Parts of two records that lie between each other, and a whole one."""
    headers = [
        {"rlstreams-record": record, "rlstreams-part": f"{number}/2".encode()}
        for number in (0, 1)
        for record in (b"a", b"b")
    ]
    values = [b"a0", b"b0", b"a1", b"b1"]
    records = [*zip(values, headers, strict=True), (b"whole", {})]
    assert [b"a0a1", b"b0b1", b"whole"] == list(schemas_page()["whole_values"](records))


@cache
def _page():
    page = schemas_page()
    return page, page["load_schemas"](FOLDER)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32))
def test_what_the_model_saw(seed: int):
    """By the page's own function, of whatever tree."""
    (page, schemas), log = _page(), played(seed)
    read = [page["read_event"](b"".join(encode(event)), schemas)[1] for event in log.committed]
    calls = {call["call_id"]: call for call in read}
    assert {name: page["tokens_of"](calls, name) for name in calls} == log.saw


def test_a_raw_tensor_is_one_numpy_call():
    """The line below the block says how."""
    page = schemas_page()
    event = one_of_each()["Prompt"]
    _, fields = page["read_event"](b"".join(encode(event)), page["load_schemas"](FOLDER))
    t = fields["token_ids"]
    array = np.frombuffer(t["data"], t["dtype"]).reshape(t["shape"])
    assert event.token_ids.numpy().tolist() == array.tolist()
