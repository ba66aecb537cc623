import pytest
from tokenizers.processors import TemplateProcessing
from transformers import Gemma2Config, GenerationConfig, MambaConfig, Qwen3Config

from whet.data.tokenizer import byte_tokenizer, encode_texts, load_tokenizer, pad_token_id, stop_token_ids
from whet.errors import ConfigError

CHAT = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tokenizer():
    return byte_tokenizer()


def test_the_id_of_a_byte_is_its_value(tokenizer):
    text = "".join(map(chr, range(128))) + "héllo 日本 \U0001f600\r\n"
    assert tokenizer(text).input_ids == list(text.encode())
    assert tokenizer.decode(list(range(128))) == "".join(map(chr, range(128)))


def test_special_tokens_follow_the_bytes(tokenizer):
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id, len(tokenizer)) == (256, 257, 259)
    assert tokenizer("a<|im_end|>").input_ids == [97, 256]


def test_byte_tokenizer_survives_saving(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(tmp_path)
    text = " a\n\té<|im_end|>  "
    assert again(text).input_ids == tokenizer(text).input_ids
    assert again.decode(again(text).input_ids) == text
    assert (again.eos_token_id, again.pad_token_id, len(again)) == (256, 257, 259)
    chat = {"tokenize": True, "return_dict": False, "add_generation_prompt": True}
    assert again.apply_chat_template(CHAT, **chat) == tokenizer.apply_chat_template(CHAT, **chat)


def test_a_tokenizer_object_comes_back_as_it_is(tokenizer):
    assert load_tokenizer(tokenizer) is tokenizer
    assert len(load_tokenizer("byte")) == 259


def test_what_is_no_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="has no model, tokenizer or run, but nothing; give the folder of one"):
        load_tokenizer(tmp_path)
    with pytest.raises(ConfigError, match="got int"):
        load_tokenizer(3)


@pytest.mark.parametrize("config", [Qwen3Config, Gemma2Config, MambaConfig])
def test_a_models_folder_without_a_tokenizer_is_refused_and_says_what_to_set(tmp_path, config):
    config().save_pretrained(tmp_path)  # transformers makes an empty tokenizer of the model's class
    with pytest.raises(ConfigError, match=r"no file there has a vocabulary.*set tokenizer to the folder or hub name"):
        load_tokenizer(str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
@pytest.mark.parametrize("content", [b"", b"[]", b'{"a":' * 200_000], ids=["empty", "list", "deep"])
def test_files_of_a_tokenizer_that_are_broken_are_errors_that_say_where(tokenizer, tmp_path, name, content):
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"no tokenizer at|{name} can't be read"):
        load_tokenizer(tmp_path)


def test_stop_ids_gather_from_everywhere_as_int_or_list(tokenizer):
    config, generation = Qwen3Config(eos_token_id=[1, 2]), GenerationConfig(eos_token_id=5)
    assert stop_token_ids(tokenizer, config, generation) == (1, 2, 5, 256)
    assert stop_token_ids(tokenizer, Qwen3Config(), GenerationConfig()) == (256,)
    outside = GenerationConfig(eos_token_id=[9, 255001])
    assert stop_token_ids(tokenizer, Qwen3Config(vocab_size=264, eos_token_id=255001), outside) == (9, 256)
    assert stop_token_ids(tokenizer) == (256,)


def test_pad_falls_back_to_eos_then_to_a_stop_id_and_the_tokenizer_stays_as_it_was():
    tokenizer = byte_tokenizer()
    tokenizer.pad_token = None
    assert pad_token_id(tokenizer) == 256
    assert tokenizer.pad_token is None
    tokenizer.eos_token = None
    assert pad_token_id(tokenizer, (9,)) == 9
    assert pad_token_id(tokenizer) == 0
    assert stop_token_ids(tokenizer) == ()


def test_a_broken_config_and_an_adapter_alone_are_named_as_the_cause(tokenizer, tmp_path):
    broken, adapter = tmp_path / "broken", tmp_path / "adapter"
    tokenizer.save_pretrained(broken)
    (broken / "config.json").write_text('{"model_type": ')
    with pytest.raises(ConfigError, match=r"broken/config.json can't be read: JSONDecodeError.*copy it again"):
        load_tokenizer(broken)
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "base_model_name_or_path": "models/base"}')
    with pytest.raises(ConfigError, match=r"is an adapter without a tokenizer; .*tokenizer=models/base$"):
        load_tokenizer(adapter)


@pytest.mark.parametrize("options", [{}, {"add_special_tokens": False}])
def test_texts_encoded_together_are_those_of_transformers(options):
    tokenizer, texts = byte_tokenizer(), ["2+2=", "", "<|im_end|>\u00e9", "a" * 40]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", tokenizer.convert_tokens_to_ids("<|im_start|>"))]
    )
    tokenizer(texts, truncation=True, max_length=3, padding=True)  # the library keeps such settings
    found = encode_texts(tokenizer, texts, **options)
    assert found == [tokenizer(text, **options).input_ids for text in texts] and len(found[3]) >= 40
