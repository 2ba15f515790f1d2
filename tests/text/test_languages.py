"""Languages by code, name and alias."""

import pytest
from whisper.tokenizer import TO_LANGUAGE_CODE

from whisperport.errors import UsageError
from whisperport.speech.text import LANGUAGES, language_code


def test_every_code_and_name_and_alias_of_openai_is_understood() -> None:
    for code in LANGUAGES:
        assert language_code(code.upper()) == code
    for name, code in TO_LANGUAGE_CODE.items():
        assert language_code(f" {name.title()} ") == code


@pytest.mark.parametrize(
    ("name", "hint"), [("germn", "german"), ("klingon-7", "use a code"), ("", "use a code")]
)
def test_an_unknown_language_is_rejected_with_the_closest(name: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        language_code(name)

    assert hint in caught.value.hint
