"""TRL's data utilities by whet.trl against TRL's own, on the same rows."""

import copy

import datasets
import pytest

from whet.data.tokenizer import byte_tokenizer
from whet.errors import ConfigError, DataError
from whet.trl import data_utils as own

theirs = pytest.importorskip("trl.data_utils")
USER, SAID, OTHER = ([{"role": role, "content": text}] for role, text in
                     (("user", "Hi?"), ("assistant", "Hello. "), ("assistant", "Hell no")))  # fmt: skip
ROWS = [
    {"messages": USER + SAID},
    {"prompt": USER},
    {"prompt": USER + SAID, "more": 1},
    {"prompt": USER, "completion": SAID, "chat_template_kwargs": {"shouting": True}},
    {"prompt": USER, "completion": SAID, "label": False},
    {"prompt": USER, "chosen": SAID, "rejected": OTHER},
    {"chosen": USER + SAID, "rejected": USER + OTHER},
    {"prompt": "1+1=", "completion": "2"},
    {"chosen": "The sky is blue.", "rejected": "The sky is green."},
    {"prompt": "Hi?", "chosen": USER + SAID, "rejected": USER + OTHER},
    {"chosen": "a", "rejected": "b"},
    {"chosen": "same", "rejected": "same"},
    {"conversations": [{"from": "user", "value": "Hi?"}, {"from": "assistant", "value": "Ho"}]},
    {"text": "no form"},
]
TEMPLATE = """{%- for m in messages %}<{{ m.role }}>{{ m.content | upper if shouting else m.content }}</>{% endfor %}
{%- if tools %}{{ tools | length }} tools{% endif %}{% if add_generation_prompt %}<assistant>{{ opened }}{% endif %}"""


def both(name, *args, **kwargs):
    return [getattr(module, name)(*copy.deepcopy(args), **kwargs) for module in (own, theirs)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row))
def test_what_is_made_of_a_row_is_what_trl_makes_of_it(row):
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    names = ["is_conversational_from_value", "maybe_convert_to_chatml"]
    if row.get("prompt") != "Hi?":  # TRL looks at one of the columns, whichever a set of names gives first
        names.append("is_conversational")
    names += ["maybe_extract_prompt"] if "chosen" in row else []
    for name in names:
        mine, wanted = both(name, row)
        assert mine == wanted, name
    if row.get("prompt") == "Hi?":
        with pytest.raises(DataError, match="apply maybe_extract_prompt first"):
            own.apply_chat_template(row, tokenizer)
        return
    for options in ({}, {"opened": "<tool_call>", "tools": [{"name": "add"}]}):  # not in the whole conversation
        mine, wanted = both("maybe_apply_chat_template", row, tokenizer, **options)
        assert mine == wanted


def test_rows_that_no_template_fits_are_named():
    for row, message in (
        ({"prompt": USER, "rejected": OTHER}, "Invalid keys"),
        ({"prompt": [{"role": "system"}]}, "role"),
    ):
        with pytest.raises(DataError, match=message):
            own.apply_chat_template(row, byte_tokenizer())


PAIRS = [{"prompt": f"{i}", "chosen": f"{i} yes", "rejected": "no", "more": i} for i in range(5)]


@pytest.mark.parametrize("form", ["Dataset", "DatasetDict", "IterableDataset"])
def test_pairs_become_the_rows_that_trl_makes_of_them(form):
    made = datasets.Dataset.from_list(PAIRS)
    given = {
        "Dataset": made,
        "DatasetDict": datasets.DatasetDict(train=made),
        "IterableDataset": made.to_iterable_dataset(),
    }
    for mine, wanted in (both("unpair_preference_dataset", given[form]), both("maybe_unpair_preference_dataset", made)):
        splits = [x["train"] if isinstance(x, datasets.DatasetDict) else x for x in (mine, wanted)]
        assert [*splits[0]] == [*splits[1]]
    assert [*own.unpair_rows(PAIRS)] == [*both("unpair_preference_dataset", made)[1]]
    texts = datasets.Dataset.from_list([{"text": "a"}])
    assert own.maybe_unpair_preference_dataset(texts) is texts


@pytest.mark.parametrize("strategy", ["bfd", "bfd_split", "wrapped"])
@pytest.mark.parametrize("stream", [False, True])
def test_packs_are_trl_s(strategy, stream):
    lengths = (5, 2, 3, 1, 0, 4, 9, 2, 7)
    rows = [
        {"input_ids": [10 * i + j for j in range(n)], "mask": [j % 2 for j in range(n)]} for i, n in enumerate(lengths)
    ]
    data = datasets.Dataset.from_list(rows)
    found = both("pack_dataset", data.to_iterable_dataset() if stream else data, 4, strategy)
    assert [*found[0]] == [*found[1]]
    assert own.pack_dataset(data.with_format("numpy", ["input_ids"]), 4).format["type"] == "numpy"
    assert [row["input_ids"] for row in own.truncate_dataset(data, 2)] == [row["input_ids"][:2] for row in rows]
    with pytest.raises(ConfigError, match="unknown packing strategy 'bdf'; did you mean bfd"):
        own.pack_dataset(data, 4, "bdf")
    with pytest.raises(DataError, match="'text' is not; remove it first"):
        own.pack_dataset(datasets.Dataset.from_list([{"text": "a"}]), 4)
