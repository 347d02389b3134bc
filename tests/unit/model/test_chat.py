"""Prompts that open the thinking, responses with and without its tags, and the tokens that end a turn."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import AddedToken

from score_centering.model.chat import (
    encode_prompt,
    generation_eos,
    read_responses,
    response_text,
    stop_token_ids,
    thinking_is_open,
)
from score_centering.model.scratch import CHAT_TEMPLATE, train_tokenizer
from score_centering.reward import final_answer
from score_centering.settings import UserError

# How Qwen3.5's template ends a prompt: thinking open, or closed and empty where it is switched off.
THINKING = CHAT_TEMPLATE + (
    "{% if add_generation_prompt %}{% if enable_thinking is defined and enable_thinking is false %}"
    "<think>\n\n</think>\n\n{% else %}<think>\n{% endif %}{% endif %}"
)


@pytest.fixture
def tokenizer():
    return train_tokenizer(["Sum: 1 + 2 = <think> so </think> \\boxed{3}", "user\nassistant\n"], 400)


@pytest.mark.parametrize("special", [None, False, True], ids=["text", "token", "special token"])
@pytest.mark.parametrize(("thinking", "is_open"), [(True, True), (False, False)])
def test_the_encoded_prompt_tells_whether_thinking_is_open(tokenizer, special, thinking, is_open):
    if special is not None:
        tokenizer.add_tokens([AddedToken(tag, special=special) for tag in ("<think>", "</think>")])
    tokenizer.chat_template = THINKING
    prompt = encode_prompt(tokenizer, "Sum: 1 + 2 =", "Box it.", thinking)
    assert thinking_is_open(tokenizer, prompt) is is_open


def test_a_template_without_thinking_opens_none_whatever_the_problem_says(tokenizer):
    for problem in ("Sum: 1 + 2 =", "What does <think> mean?", "<think>"):
        assert not thinking_is_open(tokenizer, encode_prompt(tokenizer, problem, "Box it."))


@pytest.mark.parametrize("special", [None, False, True], ids=["text", "token", "special token"])
def test_the_tags_of_the_thinking_reach_the_scorer(tokenizer, special):
    """A tokenizer that lists `</think>` as a special token would drop it, and with it every answer."""
    if special is not None:
        tokenizer.add_tokens([AddedToken(tag, special=special) for tag in ("<think>", "</think>")])
    text = "so \\boxed{4}</think> \\boxed{3}"
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    assert response_text(tokenizer, np.array(ids)) == text
    tokenizer.chat_template = THINKING
    for tail, answer in ((ids, "3"), (ids[: ids.index(tokenizer.encode("4", add_special_tokens=False)[0]) + 2], None)):
        rollout = SimpleNamespace(
            prompt_ids=np.array(encode_prompt(tokenizer, "Sum", "Box it.")), token_ids=np.array(tail)
        )
        [[response], [thinking]] = read_responses(tokenizer, [rollout])
        assert final_answer(response, thinking) == answer


def test_the_templates_end_of_turn_is_a_stop_token_whatever_the_tokenizer_names(tokenizer, capsys):
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert stop_token_ids(tokenizer, None) == (end,)
    tokenizer.add_special_tokens({"eos_token": "<|endoftext|>"})
    other = tokenizer.eos_token_id
    assert other != end
    assert stop_token_ids(tokenizer, None) == (end, other)
    assert stop_token_ids(tokenizer, 7) == (end, 7, other)
    assert stop_token_ids(tokenizer, [other, 9]) == (end, other, 9)
    assert capsys.readouterr().err == ""


def test_a_template_that_ends_a_turn_with_text_says_so_in_one_line(tokenizer, capsys):
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n###\n{% endfor %}"
    assert stop_token_ids(tokenizer, None) == (tokenizer.eos_token_id,)
    [line] = capsys.readouterr().err.splitlines()
    assert "'###'" in line and "chat template" in line


def test_a_template_without_an_end_of_turn_or_without_turns_is_silent(tokenizer, capsys):
    for template in ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "{{ raise_exception('no turns') }}"):
        tokenizer.chat_template = template
        assert stop_token_ids(tokenizer, None) == (tokenizer.eos_token_id,)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("content", "found"), [(None, None), ({}, None), ({"eos_token_id": 5}, 5), ({"eos_token_id": [5, 6]}, [5, 6])]
)
def test_the_folders_generation_config_names_stop_tokens(tmp_path, content, found):
    if content is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(content))
    assert generation_eos(tmp_path) == found


@pytest.mark.parametrize("eos", ["</s>", -1, [5, "6"], {"id": 5}, True])
def test_a_generation_config_that_names_no_token_is_refused(tmp_path, eos):
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id"):
        generation_eos(tmp_path)
