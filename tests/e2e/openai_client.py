"""OpenAI's Python package, unmodified, against a server: run by openai_test.py with a Python that has the package.

    python openai_client.py http://HOST:PORT/v1 MODEL
"""

import asyncio
import sys

import openai

BASE, MODEL = sys.argv[1:]
TEXT = "Once upon a time"
STREAMS = 64


def check(condition, what):
    if not condition:
        raise AssertionError(what)


def completions(client):
    whole = client.completions.create(model=MODEL, prompt=TEXT, max_tokens=8, temperature=0, logprobs=2)
    check(whole.usage.completion_tokens == 8 and whole.choices[0].finish_reason == "length", whole)
    check(len(whole.choices[0].logprobs.top_logprobs) == 8, whole)
    check(whole.usage.prompt_tokens_details.cached_tokens is not None, whole)
    chunks = list(client.completions.create(model=MODEL, prompt=TEXT, max_tokens=8, temperature=0, stream=True,
                                            stream_options={"include_usage": True}))
    check("".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text, chunks)
    check(chunks[-1].usage.completion_tokens == 8, chunks)
    several = client.completions.create(model=MODEL, prompt=[TEXT, "Another"], n=2, max_tokens=4, extra_body={"top_k": 5})
    check([choice.index for choice in several.choices] == [0, 1, 2, 3], several)
    raw = client.completions.with_raw_response.create(model=MODEL, prompt=TEXT, extra_headers={"x-request-id": "mine"})
    check(raw.headers["x-request-id"] == "mine" and raw.parse().id == "cmpl-mine", raw.headers)


def chat(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": TEXT}]}]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=8, temperature=0,
                                           logprobs=True, top_logprobs=2)
    choice = whole.choices[0]
    check(choice.message.role == "assistant" and choice.message.content and choice.finish_reason in ("stop", "length"), whole)
    check(len(choice.logprobs.content) == whole.usage.completion_tokens, whole)
    check(len(choice.logprobs.content[0].top_logprobs) == 2, whole)
    chunks = list(client.chat.completions.create(model=MODEL, messages=messages, max_completion_tokens=8, temperature=0,
                                                 stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    check(text == choice.message.content and chunks[0].choices[0].delta.role == "assistant", chunks)
    check(chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, chunks)
    with client.chat.completions.stream(model=MODEL, messages=messages, max_completion_tokens=8, temperature=0) as stream:
        check("".join(event.delta for event in stream if event.type == "content.delta") == text, "events")
    echoed = client.completions.create(model=MODEL, prompt=TEXT, max_tokens=1, temperature=0, logprobs=1, echo=True)
    scores = echoed.choices[0].logprobs
    check(scores.token_logprobs[0] is None and len(scores.token_logprobs) == echoed.usage.prompt_tokens + 1, echoed)
    check(echoed.choices[0].text.startswith(TEXT), echoed)


def errors(client):
    try:
        client.completions.create(model="gpt-4", prompt=TEXT)
        raise AssertionError("a model that is not served")
    except openai.NotFoundError as error:
        check(error.code == "model_not_found" and error.param == "model", error.body)
    try:
        client.completions.create(model=MODEL, prompt=TEXT, temperature=1000)
        raise AssertionError("a temperature out of its range")
    except openai.BadRequestError as error:
        check(error.param == "temperature" and error.type == "invalid_request_error", error.body)


async def at_once():
    async with openai.AsyncOpenAI(base_url=BASE, api_key="none") as client:
        async def one():
            stream = await client.completions.create(model=MODEL, prompt=TEXT, max_tokens=16, temperature=0, stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])
        texts = await asyncio.gather(*[one() for _ in range(STREAMS)])
    check(len(set(texts)) == 1 and texts[0], texts)


def main():
    with openai.OpenAI(base_url=BASE, api_key="none") as client:
        check([model.id for model in client.models.list()] == [MODEL], "models")
        check(client.models.retrieve(MODEL).id == MODEL, "a model")
        completions(client)
        chat(client)
        errors(client)
    asyncio.run(at_once())
    print("openai", openai.__version__, "ran to the end")


if __name__ == "__main__":
    main()
