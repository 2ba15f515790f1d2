"""The languages Whisper was trained on, in the order of their token ids."""

import difflib
from collections.abc import Container

from whisperport.errors import UsageError

# Name by code, in the order of the ids of <|en|>, <|zh|>, ...; large-v3 added "yue".
LANGUAGES = {
    "en": "english",
    "zh": "chinese",
    "de": "german",
    "es": "spanish",
    "ru": "russian",
    "ko": "korean",
    "fr": "french",
    "ja": "japanese",
    "pt": "portuguese",
    "tr": "turkish",
    "pl": "polish",
    "ca": "catalan",
    "nl": "dutch",
    "ar": "arabic",
    "sv": "swedish",
    "it": "italian",
    "id": "indonesian",
    "hi": "hindi",
    "fi": "finnish",
    "vi": "vietnamese",
    "he": "hebrew",
    "uk": "ukrainian",
    "el": "greek",
    "ms": "malay",
    "cs": "czech",
    "ro": "romanian",
    "da": "danish",
    "hu": "hungarian",
    "ta": "tamil",
    "no": "norwegian",
    "th": "thai",
    "ur": "urdu",
    "hr": "croatian",
    "bg": "bulgarian",
    "lt": "lithuanian",
    "la": "latin",
    "mi": "maori",
    "ml": "malayalam",
    "cy": "welsh",
    "sk": "slovak",
    "te": "telugu",
    "fa": "persian",
    "lv": "latvian",
    "bn": "bengali",
    "sr": "serbian",
    "az": "azerbaijani",
    "sl": "slovenian",
    "kn": "kannada",
    "et": "estonian",
    "mk": "macedonian",
    "br": "breton",
    "eu": "basque",
    "is": "icelandic",
    "hy": "armenian",
    "ne": "nepali",
    "mn": "mongolian",
    "bs": "bosnian",
    "kk": "kazakh",
    "sq": "albanian",
    "sw": "swahili",
    "gl": "galician",
    "mr": "marathi",
    "pa": "punjabi",
    "si": "sinhala",
    "km": "khmer",
    "sn": "shona",
    "yo": "yoruba",
    "so": "somali",
    "af": "afrikaans",
    "oc": "occitan",
    "ka": "georgian",
    "be": "belarusian",
    "tg": "tajik",
    "sd": "sindhi",
    "gu": "gujarati",
    "am": "amharic",
    "yi": "yiddish",
    "lo": "lao",
    "uz": "uzbek",
    "fo": "faroese",
    "ht": "haitian creole",
    "ps": "pashto",
    "tk": "turkmen",
    "nn": "nynorsk",
    "mt": "maltese",
    "sa": "sanskrit",
    "lb": "luxembourgish",
    "my": "myanmar",
    "bo": "tibetan",
    "tl": "tagalog",
    "mg": "malagasy",
    "as": "assamese",
    "tt": "tatar",
    "haw": "hawaiian",
    "ln": "lingala",
    "ha": "hausa",
    "ba": "bashkir",
    "jw": "javanese",
    "su": "sundanese",
    "yue": "cantonese",
}

# Languages written without spaces. Each character is a word in word timestamps and in error rates.
# Source: openai/whisper@v20250625, whisper/tokenizer.py:279-284; Radford et al. 2022, appendix C.
WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})

# Other names of languages.
ALIASES = {
    "burmese": "my",
    "valencian": "ca",
    "flemish": "nl",
    "haitian": "ht",
    "letzeburgesch": "lb",
    "pushto": "ps",
    "panjabi": "pa",
    "moldavian": "ro",
    "moldovan": "ro",
    "sinhalese": "si",
    "castilian": "es",
    "mandarin": "zh",
}


def language_code(name: str, known: Container[str] = ()) -> str:
    """Return the code of a language: "en", "English" and "ENGLISH" all return "en".

    Args:
        name: code, name or other name of a language, in any case.
        known: codes of the checkpoint, which are returned as they are. They may differ from OpenAI's.

    Raises:
        UsageError: there is no such language. The hint has the closest names.
    """
    if name in known:
        return name
    key = name.strip().lower()
    by_name = {language: code for code, language in LANGUAGES.items()} | ALIASES
    if key in LANGUAGES:
        return key
    if key in by_name:
        return by_name[key]
    close = difflib.get_close_matches(key, [*LANGUAGES, *by_name], n=3)
    raise UsageError(
        f"Whisper has no language `{name}`",
        why=f"it has {len(LANGUAGES)} languages, each with a code and a name",
        hint=f"did you mean {' or '.join(close)}?" if close else "use a code such as en, de or ja",
    )
