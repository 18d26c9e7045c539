"""TRL's own client (trl.generation.vllm_client) against toka serve: texts, ids, chats, log-probabilities of given ids, the prefix cache, and
what it says of weights over NCCL. Needs trl, torch and transformers; vLLM, which the client asks for, is not needed."""
import importlib
import os
import sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
from server import Server  # noqa: E402


def load_client():
    """The client's class. It imports parts of vLLM, which only its transfer of weights uses."""
    imports = importlib.import_module("trl.import_utils")
    imports.is_vllm_available = lambda *_, **__: False
    vllm_client = importlib.import_module("trl.generation.vllm_client")
    vllm_client.is_vllm_available = lambda *_, **__: True
    return vllm_client.VLLMClient


def check_lists(answer, n, tokens):
    """Each completion has its ids and, of each position, log-probabilities with their ids, the highest first."""
    assert len(answer["completion_ids"]) == n and all(len(ids) == tokens for ids in answer["completion_ids"])
    for ids, logprobs, names in zip(answer["completion_ids"], answer["logprobs"], answer["logprob_token_ids"]):
        assert all(i in some for i, some in zip(ids, names)) and all(x == sorted(x, reverse=True) for x in logprobs)


def main():
    with Server("--served-model-name", "tiny") as s:
        client = load_client()(base_url=f"http://127.0.0.1:{s.address[1]}", connection_timeout=10)
        assert client.model == "tiny" and client.get_world_size() == 1
        more = {"generation_kwargs": {"ignore_eos": True, "seed": 3}, "max_tokens": 6}
        text = client.generate(["Tom has 12 apples.", "Ann"], n=3, **more)
        check_lists(text, 6, 6)
        assert client.generate(text["prompt_ids"], n=3, logprobs=2, **more)["completion_ids"] == text["completion_ids"]
        check_lists(client.generate(text["prompt_ids"], n=3, logprobs=2, **more), 6, 6)
        check_lists(client.chat([[{"role": "user", "content": "Tom"}], [{"role": "user", "content": "Ann"}]], n=2, **more), 4, 6)
        digits = client.generate(["Tom has "], structured_outputs_regex="[0-9]{2}", max_tokens=9)
        assert digits["completion_ids"][0]
        whole = [text["prompt_ids"][0] + text["completion_ids"][0]]
        length = len(text["prompt_ids"][0])
        scored = client.get_sequence_logprobs(whole, [length], top_logprobs=100)
        for position, (names, actual) in enumerate(zip(scored["logprob_token_ids"][0], scored["actual_logprobs"][0])):
            near = text["logprobs"][0][position][0]
            assert len(names) == 100 and scored["actual_token_ids"][0][position] == [whole[0][length + position]]
            assert abs(actual[0] - near) < 1e-3, (position, actual, near)
        client.reset_prefix_cache()
        try:
            client.init_communicator()
        except RuntimeError as e:
            assert "has no weight-transfer engine" in str(e), e
        else:
            raise SystemExit("the client believes that weights come over NCCL")
        try:
            client.update_named_params([("a", "bfloat16", [1])], iter(()))
        except Exception as e:
            assert "501" in str(e) and "this server runs on the CPU" in str(e), e
        else:
            raise SystemExit("an update without a communicator")
    print("texts, ids, chats and scores through TRL's client; one error for weights over NCCL")


main()
