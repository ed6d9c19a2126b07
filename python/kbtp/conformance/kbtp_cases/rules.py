"""What the draft and the profile ask of targets and initiators, rule by rule, in our words.

Ids: KM messages, KO and KS order of checks and statuses, KC connections and credits, KH, KV and KP HELLO, KI identity,
KL, KT, KA and KF the four operations, KB, KG and KQ blocks, Generations and quotas, KD descriptors, KW turns, KR races;
KX direct modes, KU authentication, KY bindings; KNC, KNH, KNR and KNX what initiators have to do.
"""

from __future__ import annotations

from kbtp.conformance.kbtp_cases.rules_blocks import BLOCK_RULES
from kbtp.conformance.kbtp_cases.rules_direct import DIRECT_RULES
from kbtp.conformance.kbtp_cases.rules_initiator import INITIATOR_RULES
from kbtp.conformance.kbtp_cases.rules_session import SESSION_RULES
from kbtp.conformance.rule import Rule

RULES: tuple[Rule, ...] = (*SESSION_RULES, *BLOCK_RULES, *DIRECT_RULES, *INITIATOR_RULES)
