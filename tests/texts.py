"""Texts of many scripts, spaces and marks, on which tokenizers differ."""

TEXTS = [
    "hello, world! It's 1234.5 o'clock;  don't   WAIT\n\n  for\tit\r\n",
    "Café cafe\u0301 naïve Ünïcödé 中文字符 日本語テキスト 😀👩‍👩‍👧 ½ ٣٤٥ ⅷ",
    "def f(x):\n    return x**2  # comment\n\n\n",
    "  leading and trailing  ",
    "<|im_start|>user\nhi<|im_end|>",
    "",
    " ",
    "\u0000\u200b\ufeff",
    "aaaa'LL 'Tis IT'S we'Re /path//to\n/x",
]
