"""Checks of the tokenizer and its chat template."""

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from . import evaluation
from .chat import Renderer, Unusable
from .config_schema import did_you_mean
from .conversations import Conversation, read_conversations, read_row, with_system
from .errors import AerieError, describe, shown
from .generation import length_limit
from .keys import canonical_json
from .preflight import Finding, Subject
from .regeneration import prompt_of

_SPACED = "def f(x):\n    return  x  # two  spaces\n\n\ttab, ünïcödé, 12345"
_READ_ROWS = 500  # of each source, for the roles in it
_CALLS = "tool call"  # an answer, but of a form of its own
_ROLES = ("system", "user", "assistant", _CALLS, "tool")
_LONGEST = 80  # characters shown of an option's value
_GENERATION = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # tags of transformers' own
_ALWAYS_GIVEN = {"add_generation_prompt", "messages", "raise_exception", "strftime_now", "tools"}
_CALL = {"type": "function", "id": "call00000", "function": {"name": "look", "arguments": {"at": "x"}}}
_TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object", "properties": {}}}}
_TALK: list[dict[str, Any]] = [
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "two", "reasoning_content": "a thought"},
    {"role": "user", "content": "three"},
    {"role": "assistant", "content": "four", "reasoning_content": "another"},
]
# (messages, tools) in which an option can show.
_CONVERSATIONS: list[tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = [
    (_TALK[:1], None),
    (_TALK[:3], None),
    (_TALK, None),
    ([{"role": "system", "content": "zero"}, *_TALK], None),
    (_TALK[:1], [_TOOL]),
    (
        [
            _TALK[0],
            {"role": "assistant", "content": "", "tool_calls": [_CALL]},
            {"role": "tool", "content": "seen", "tool_call_id": "call00000", "name": "look"},
            _TALK[1],
        ],
        [_TOOL],
    ),
]


def vocabulary(subject: Subject) -> Finding:
    """Whether the tokenizer's ids fit the output head (which may have rows beyond them: padding)."""
    known, rows = len(subject.tokenizer), subject.target.vocab_size
    highest = max(subject.tokenizer.get_vocab().values(), default=-1)
    if max(known, highest + 1) > rows:
        return Finding(
            "failed", f"the tokenizer has {known} ids up to {highest}, the config's vocabulary {rows}", "Take both from the same model"
        )
    padding = f", {rows - known:,} of them padding" if rows > known else ""
    return Finding("ok", f"{known:,} tokenizer ids, {rows:,} rows in the head{padding}")


def round_trip(subject: Subject) -> Finding:
    """Whether text survives the tokenizer, white space included."""
    tokenizer = subject.tokenizer
    back = tokenizer.decode(tokenizer(_SPACED, add_special_tokens=False)["input_ids"], clean_up_tokenization_spaces=False)
    if back != _SPACED:
        return Finding("failed", f"{_SPACED!r} came back as {back!r}", "Check tokenizer.json, and tokenizer_class in tokenizer_config.json")
    return Finding("ok", "text and white space survive a round trip")


def end_of_turn(subject: Subject) -> Finding:
    """Whether there is a token at which an answer ends."""
    ends = subject.target.end_tokens(subject.tokenizer)
    rows = subject.target.vocab_size
    outside = [token for token in ends if not 0 <= token < rows]
    if outside:
        return Finding(
            "failed", f"end token {outside[0]} is not among the {rows} rows of the head", "Check eos_token_id in the configuration"
        )
    if not ends:
        return Finding(
            "failed",
            "no eos_token_id in generation_config.json, config.json or the tokenizer: answers would never end",
            "Add eos_token_id to generation_config.json",
        )
    return Finding("ok", ", ".join(f"{token} {subject.tokenizer.convert_ids_to_tokens(token)!r}" for token in ends))


def chat_template(subject: Subject) -> Finding:
    """Whether the chat template renders conversations so that each dataset's answers can be told apart, and whether a longer one
    begins with the shorter one."""
    if not subject.tokenizer.chat_template:
        return Finding("failed", "the tokenizer has none", "Add chat_template.jinja to the target's folder")
    turns = [{"role": role, "content": f"turn {number}"} for number, role in enumerate(["user", "assistant"] * 2)]
    forms, wrong = set(), []
    for dataset in subject.settings["datasets"]:
        renderer = _renderer(subject, dataset)
        # What the target says itself, or nobody learns, needs no rendering that shows it.
        generated = _is_regenerated(dataset) or dataset["name"] in subject.unprepared
        try:
            rows = renderer.render(Conversation("preflight", 1, turns, generated=generated))[0]
        except Unusable:
            rows = []
        if rows and all(any(row.loss_mask) for row in rows):
            forms.add("one row a conversation" if len(rows) == 1 else "rewrites history: one row a turn")
        elif not generated and _shows_an_answer(subject, dataset, renderer):
            forms.add(f"the answers of dataset {dataset['name']} begin as the template opens them")
        else:
            wrong.append(dataset["name"])
    if wrong:
        return Finding(
            "failed",
            f"dataset {', '.join(wrong)}: the rendering of a conversation with the answer does not begin with its prompt, so no answer can "
            "be told apart",
            "Where the template opens a thought in the prompt, as those of DeepSeek-R1 and QwQ do, set `regenerate: {}` in the dataset: "
            "what the target says itself is taken as it comes. Else check the chat template and the tokenizer's end of turn",
        )
    return Finding("ok", f"renders, {'; '.join(sorted(forms))}")


def _renderer(subject: Subject, dataset: dict[str, Any]) -> Renderer:
    """What renders the dataset's conversations in the stages that use it."""
    tokenizer = subject.tokenizer
    return Renderer(tokenizer, subject.target.end_tokens(tokenizer), dataset["template_options"])


def _is_regenerated(dataset: dict[str, Any]) -> bool:
    return dataset["max_new_tokens"] is not None


def _shows_an_answer(subject: Subject, dataset: dict[str, Any], renderer: Renderer) -> bool:
    """Whether an answer in the dataset's first rows can be told apart: one that itself has a thought, or a tokenised one."""
    for conversation in _first_conversations(subject, dataset):
        try:
            if renderer.plan(conversation)[0]:
                return True
        except Exception:  # noqa: BLE001 - a template may raise anything; the dataset's stage says it of each row
            continue
    return False


def roles(subject: Subject) -> Finding:
    """Whether the chat template renders every role that the datasets' first rows have and that is used, and leaves no message out."""
    if not subject.tokenizer.chat_template:
        return Finding("failed", "there is no chat template to render them", "Add chat_template.jinja to the target's folder")
    there: set[str] = set()
    refused, dropped = [], []
    for dataset in subject.settings["datasets"]:
        renderer, found = _renderer(subject, dataset), _roles_in_data(subject, dataset)
        there |= found
        wrong, lost = {}, []
        for role in sorted(found or ("user", "assistant"), key=_ROLES.index):
            # As the dataset's stages render it: with the ids of tool calls, and in the form that the template wants.
            messages = read_row({"messages": _conversation_with(role, found, _is_regenerated(dataset))}, "preflight", 1).messages
            try:
                text = renderer.text(messages, ready=_is_regenerated(dataset))
            except Unusable:  # the template shows no tool calls; rows with some are not used
                text = ""
            except Exception as error:  # noqa: BLE001 - templates raise what they like
                wrong[role] = describe(error).splitlines()[0]
                continue
            if f"say {role}" not in text:
                lost.append(role)
        refused += [f"dataset {dataset['name']}: {', '.join(f'{role} ({cause})' for role, cause in wrong.items())}"] if wrong else []
        dropped += [f"dataset {dataset['name']}: {', '.join(lost)}"] if lost else []
    if refused:
        return Finding(
            "failed",
            f"the chat template refuses a role that the data has: {'; '.join(refused)}",
            "Take these messages out, or mend the template",
        )
    if dropped:
        return Finding(
            "warning",
            f"the chat template leaves out messages of the role: {'; '.join(dropped)}",
            "Take these messages out, or mend the template",
        )
    said = ", ".join(sorted(there, key=_ROLES.index))
    return Finding("ok", f"{said}: each is rendered" if said else "no source is there yet; user and assistant are rendered")


def template_options(subject: Subject) -> Finding:
    """Whether each of the datasets' template_options changes a rendering: the template takes any name, and a misspelt one does nothing."""
    if not subject.tokenizer.chat_template:
        return Finding("failed", "there is no chat template that takes any", "Add chat_template.jinja to the target's folder")
    known = _variables(subject.tokenizer.chat_template)
    useless, used = [], []
    for dataset in subject.settings["datasets"]:
        options = dataset["template_options"]
        for name, value in options.items():
            without = dataset | {"template_options": {key: options[key] for key in options if key != name}}
            told = f"{name}: {shown(value, _LONGEST)} of dataset {dataset['name']}"
            if _renderings(subject, dataset) != _renderings(subject, without):
                used.append(told)
            elif name in known:
                useless.append(f"{told} (the template reads it, but renders the same without it)")
            else:
                takes = f"the template takes {', '.join(known)}" if known else "the template takes none"
                useless.append(f"{told} (the template does not read it; {did_you_mean(name, known) or takes})")
    if useless:
        return Finding(
            "warning", f"changes no rendering: {'; '.join(useless)}", "Correct its name or value in template_options, or delete it there"
        )
    return Finding("ok", "; ".join(used) or "none is given")


def _renderings(subject: Subject, dataset: dict[str, Any]) -> list[str]:
    """What becomes of conversations of every kind, with and without a generation prompt."""
    renderer = _renderer(subject, dataset)
    found = []
    for messages, tools in _CONVERSATIONS:
        for ready in (False, True):
            try:
                found.append(renderer.text(messages, tools, ready))
            except Exception as error:  # noqa: BLE001 - a template may raise anything, with one option and not without it
                found.append(describe(error).splitlines()[0])
    return found


def _variables(chat_template: str | dict[str, str]) -> list[str]:
    """What the template takes from outside, but for what it is always given; none where it cannot be parsed."""
    from jinja2 import Environment, TemplateSyntaxError, meta, nodes

    texts = chat_template.values() if isinstance(chat_template, dict) else [chat_template]
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    found: set[str] = set()
    for text in texts:
        try:
            tree = environment.parse(_GENERATION.sub("", text))
        except TemplateSyntaxError:
            continue
        # What is set in one branch counts as undeclared in another; what may be given from outside as well is asked for first.
        own = {name.name for name in tree.find_all(nodes.Name) if name.ctx == "store"}
        tests = [test for test in tree.find_all(nodes.Test) if test.name in ("defined", "undefined")]
        asked_for = {test.node.name for test in tests if isinstance(test.node, nodes.Name)}
        found |= (meta.find_undeclared_variables(tree) - own) | asked_for
    return sorted(name for name in found - set(environment.globals) - _ALWAYS_GIVEN if not name.endswith("_token"))


def evaluation_prompts(subject: Subject) -> Finding:
    """Whether every prompt of the evaluation can be asked: rendered and measured as after the training, which would be in vain."""
    if not subject.tokenizer.chat_template:
        return Finding("failed", "there is no chat template to render them", "Add chat_template.jinja to the target's folder")
    room = evaluation.Room(length_limit(subject.target, subject.runtime), subject.evaluation.get("max_new_tokens", 0))
    said = []
    for name, file in subject.evaluation.get("prompts", {}).items():
        if not Path(file).is_file():
            said.append(f"{name} is not there yet")
            continue
        # Each run's prompts are rendered as its dataset is.
        sets = [
            evaluation.read_prompts(
                Path(file), _renderer(subject, dataset), subject.evaluation["max_prompts"], room, dataset["system_prompt"]
            )
            for dataset in _rendered_differently(subject.settings["datasets"])
        ]
        longest = max(len(prompt.token_ids) for prompts in sets for prompt in prompts)
        said.append(f"{name}: {len(sets[0]):,}, the longest of {longest:,} tokens")
    return Finding("ok", "; ".join(said) or "no prompt set")


def _rendered_differently(datasets: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The datasets, those left out that are rendered as another."""
    return list(
        {canonical_json([dataset[name] for name in ("system_prompt", "template_options")]): dataset for dataset in datasets}.values()
    )


def _roles_in_data(subject: Subject, dataset: dict[str, Any]) -> set[str]:
    """The roles of what the template has to render; of a dataset that is regenerated, those that its prompts have."""
    found: set[str] = set()
    for conversation in () if dataset["name"] in subject.unprepared else _first_conversations(subject, dataset):
        if _is_regenerated(dataset):
            turns = prompt_of(conversation).turns
            found |= {message["role"] for turn in turns for message in turn}
            found |= {"assistant"} if len(turns) > 1 else set()
        else:
            found |= {message["role"] for message in conversation.messages}
            found |= {_CALLS} if any("tool_calls" in message for message in conversation.messages) else set()
    return found


def _first_conversations(subject: Subject, dataset: dict[str, Any]) -> Iterator[Conversation]:
    """The usable ones among the first rows of each of the dataset's sources that are there."""
    for path in subject.sources(dataset):
        try:
            for conversation in islice(read_conversations([path]), _READ_ROWS):
                if conversation.tokens:
                    yield conversation
                elif not conversation.problem:
                    yield conversation._replace(messages=with_system(conversation.messages, dataset["system_prompt"]))
        except AerieError:  # the dataset's stage says what is wrong with which line
            continue


def _conversation_with(role: str, there: set[str], regenerated: bool) -> list[dict[str, Any]]:
    """A short conversation that has the role where it belongs: in one to be answered where answers are regenerated."""
    asked, answered = {"role": "user", "content": "say user"}, {"role": "assistant", "content": "say assistant"}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": f"say {_CALLS}", "arguments": {}}}]}
    result = {"role": "tool", "name": f"say {_CALLS}", "content": "say tool"}
    if role == "assistant" and regenerated:
        return [asked, answered, asked]
    ending = [] if regenerated else [answered]
    if role == "system":
        return [{"role": "system", "content": "say system"}, asked, *ending]
    if role == _CALLS:
        return [asked, call]
    if role == "tool":
        return [asked, call if _CALLS in there else answered, result, *ending]
    return [asked, *ending]
