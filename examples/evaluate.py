"""Accuracy and speed of two methods on held-out story problems (not GSM8K)."""

from outpace import LLM
from outpace.lab.run import evaluate, questions_of
from outpace.methods import APD, LeftToRight

llm = LLM("tiny-dream")
questions = questions_of("story", limit=10)
for method in (LeftToRight(), APD(verifier="tiny-aux")):
    report = evaluate(llm, questions, method=method, max_tokens=128, temperature=0.0)
    low, high = report.accuracy_interval
    print(f"{report.method}: {report.accuracy:.0%}, with 95 % between {low:.0%} and {high:.0%}")
    speed = f"{report.tokens_per_second:.0f} per second"
    print(f"  {report.tokens_per_forward:.2f} tokens per forward, {speed}")
