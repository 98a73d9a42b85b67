"""The policies that the harness compares: one line each.

A policy is what decoding and prompts attend to (AttentionPolicy of proto/kvasir/v1/sparsity.proto, as JSON) and what it
needs of the server. Sink, window and budget are the run's own: they are worked in by `select`.
"""

import json
import re
from dataclasses import dataclass, field, replace
from typing import Dict, List, Sequence, Tuple

SHAPES_A_SERVER = 3  # a server declares at most four policies; its own default, `all`, is the fourth
TAIL_TOKENS = 32     # a question is shorter; every token of it selects by itself
EXTENDED = ("--position-extension=streaming",)
GROUPED = ("--position-extension=self_extend",)
EVERY_EIGHTH = {"reuse": {"rule": "interval", "interval": 8}}   # the first stage; infinitehip's later ones every 4 and 2 steps
MIN_MASS = 0.98                                                # of the contract of quality


@dataclass(frozen=True)
class Policy:
    name: str
    decode: Dict                                               # selector and stages, without numbers
    prefill: Dict = field(default_factory=lambda: {"all": {}})
    flags: Tuple[str, ...] = ()                                # of `kvasir serve`
    numbers: Dict = field(default_factory=dict)                # tokens, set by select()

    @property
    def has_budget(self) -> bool:
        return not {"all", "streaming"} & set(self.decode)

    @property
    def served_name(self) -> str:
        """By which requests name it: '+' is not allowed there. The server's default is dense."""
        return "" if self.decode == {"all": {}} else re.sub("[^a-z0-9_-]", "-", self.name)

    @property
    def only_selects(self) -> bool:
        """One step's selection says all: no stage works over several steps, inside of attention, or on positions."""
        return len(set(self.decode) - {"top_p", "quality"}) == 1 and not self.flags

    @property
    def has_contract(self) -> bool:
        return "quality" in self.decode

    @property
    def block_tokens(self) -> int:
        """What its selector chooses: blocks of so many tokens."""
        if "infinitehip" in self.decode:
            return 16 if self.decode["infinitehip"].get("preset") == "5k" else 8
        return 64 if "quest" in self.decode else 2 if "hip" in self.decode else 1

    @property
    def budget(self) -> int:
        return self.numbers.get("token_budget", 0)

    @property
    def spec(self) -> str:
        """All that an answer depends on: results are kept by it."""
        return json.dumps([self.message(), self.flags], sort_keys=True)

    def message(self) -> Dict:
        """As a SparsityPolicy."""
        return {"name": self.served_name, "prefill": {**self.prefill, **self.numbers},
                "decode": {**self.decode, **self.numbers}, "tail_tokens": TAIL_TOKENS}


POLICIES = {policy.name: policy for policy in (
    Policy("all", {"all": {}}),
    Policy("streaming", {"streaming": {}}),
    Policy("quest", {"quest": {}}),
    Policy("quest bound", {"quest": {"score": "bound"}}),
    Policy("tokenselect", {"tokenselect": {}}),
    Policy("hip", {"hip": {}}),
    Policy("infinitehip", {"infinitehip": {}}),
    Policy("infinitehip 5k", {"infinitehip": {"preset": "5k"}}),
    Policy("infinitehip centre", {"infinitehip": {"probe": "centre"}}),
    Policy("infinitehip first", {"infinitehip": {"probe": "first"}}),
    Policy("quest+top_p", {"quest": {}, "top_p": 0.95}),
    Policy("tokenselect+top_p", {"tokenselect": {}, "top_p": 0.95}),
    Policy("infinitehip+top_p", {"infinitehip": {}, "top_p": 0.95}),
    Policy("tokenselect+cosine", {"tokenselect": {}, "reuse": {"rule": "cosine"}}),
    Policy("quest+interval", {"quest": {}, "reuse": {"rule": "interval"}}),
    Policy("infinitehip+interval", {"infinitehip": {}, "reuse": {"rule": "interval"}}),
    Policy("infinitehip 3k-flash+interval", {"infinitehip": {"preset": "3k-flash"}, "reuse": {"rule": "interval"}}),
    Policy("infinitehip+both", {"infinitehip": {}, "reuse": {"rule": "both"}}),
    Policy("all+art", {"all": {}, "art": {}}),
    Policy("quest+art", {"quest": {}, "art": {}}),
    Policy("tokenselect+art", {"tokenselect": {}, "art": {}}),
    Policy("infinitehip+art", {"infinitehip": {}, "art": {}}),
    Policy("infinitehip+top_p+art", {"infinitehip": {}, "top_p": 0.95, "art": {}}),
    # Under a contract: what is estimated, and what is done about it.
    *(Policy(f"{name} {action}", {**decode, "quality": {"min_mass": MIN_MASS, "on_violation": action}})
      for name, decode in (("streaming", {"streaming": {}}), ("quest", {"quest": {}}), ("tokenselect", {"tokenselect": {}}),
                           ("hip", {"hip": {}}), ("infinitehip", {"infinitehip": {}}),
                           ("infinitehip+top_p", {"infinitehip": {}, "top_p": 0.95}))
      for action in ("report", "dense", "widen") if (name, action) != ("streaming", "widen")),
    Policy("all+self_extend", {"all": {}}, flags=GROUPED),
    Policy("hip+self_extend", {"hip": {}}, flags=GROUPED),
    # Beyond the trained window everything stands at compact positions. Prompts are read with sink and window, whatever
    # decodes: reading costs little then, and all policies of a server share what was read.
    *(Policy(f"{name} extended", {name: {}}, {"streaming": {}}, EXTENDED)
      for name in ("streaming", "quest", "tokenselect", "hip", "infinitehip")),
    Policy("infinitehip 5k extended", {"infinitehip": {"preset": "5k"}}, {"streaming": {}}, EXTENDED),
    Policy("quest bound extended", {"quest": {"score": "bound"}}, {"streaming": {}}, EXTENDED),
    *(Policy(f"{name}{ending} extended", {**selector, **stages}, {"streaming": {}}, EXTENDED)
      for name, selector in (("quest", {"quest": {}}), ("quest bound", {"quest": {"score": "bound"}}),
                             ("tokenselect", {"tokenselect": {}}), ("infinitehip", {"infinitehip": {}}),
                             ("infinitehip 5k", {"infinitehip": {"preset": "5k"}}))
      for ending, stages in (("+top_p", {"top_p": 0.95}), ("+interval", EVERY_EIGHTH), ("+art", {"art": {}}),
                             ("+top_p+art", {"top_p": 0.95, "art": {}}), ("+interval+top_p", {"top_p": 0.95, **EVERY_EIGHTH}),
                             ("+interval+top_p+art", {"top_p": 0.95, "art": {}, **EVERY_EIGHTH}))),
)}


def select(names: Sequence[str], sink: int, window: int, budgets: Sequence[int]) -> List[Policy]:
    """The named policies, each once for every budget where it has one."""
    chosen = []
    for name in names:
        policy = POLICIES[name]
        if not policy.served_name:
            chosen.append(policy)
            continue
        numbers = {"sink_tokens": sink, "window_tokens": window}
        for budget in budgets if policy.has_budget else [None]:
            chosen.append(replace(policy, numbers=numbers if budget is None else {**numbers, "token_budget": budget}))
    return chosen


def servers(policies: Sequence[Policy]) -> List[List[Policy]]:
    """Policies that one server can declare together; another budget is no policy of its own there."""
    groups: List[List[Policy]] = []
    for policy in policies:
        for group in groups:
            names = {other.served_name for other in group} - {""}
            fits = policy.served_name in names | {""} or len(names) < SHAPES_A_SERVER
            if fits and group[0].flags == policy.flags:
                group.append(policy)
                break
        else:
            groups.append([policy])
    return groups
