"""Every published method, one idea per file; `fednorms.methods.FedProx(mu=0.1)` is a part, parts add up with `+`.

A method file uses only `core`, `layers` and `transforms`. `registry` reads methods from text.
"""

from fednorms.methods.adabn import AdaBN
from fednorms.methods.alone import Centralised, Standalone
from fednorms.methods.augment import Augment
from fednorms.methods.differential_privacy import CentralDP, LocalDP
from fednorms.methods.ditto import Ditto
from fednorms.methods.fbn import FBN
from fednorms.methods.fedavgm import FedAvgM
from fednorms.methods.fedbabu import FedBABU
from fednorms.methods.fedbn import FedBN
from fednorms.methods.feddc import FedDC
from fednorms.methods.feddyn import FedDyn
from fednorms.methods.fedexp import FedEXP
from fednorms.methods.fedfa import FedFA
from fednorms.methods.fedfn import FedFN, FedFR
from fednorms.methods.fednn import AGN, WeightNorm, fednn
from fednorms.methods.fednorm import FedNorm
from fednorms.methods.fednova import FedNova
from fednorms.methods.fedopt import FedAdagrad, FedAdam, FedYogi
from fednorms.methods.fedper import FedPer
from fednorms.methods.fedplvm import FedPLVM
from fednorms.methods.fedproto import FedProto
from fednorms.methods.fedprox import FedProx
from fednorms.methods.fedrdn import FedRDN
from fednorms.methods.fedrep import FedRep
from fednorms.methods.fedtan import FedTAN
from fednorms.methods.fedwon import AGC, NoNorm, WSConv, fedwon
from fednorms.methods.finetune import FineTune
from fednorms.methods.fixbn import FixBN
from fednorms.methods.fraug import FRAug
from fednorms.methods.frn import FRN
from fednorms.methods.greg import GReg, MixBN
from fednorms.methods.group_norm import GroupNorm, LayerNorm
from fednorms.methods.hbn import HBN
from fednorms.methods.inorm import InstanceNorm
from fednorms.methods.lgfedavg import LGFedAvg
from fednorms.methods.moon import MOON
from fednorms.methods.partialfed import PartialFed
from fednorms.methods.perfedavg import PerFedAvg
from fednorms.methods.pn import PN
from fednorms.methods.rbn import RBN
from fednorms.methods.scaffold import Scaffold
from fednorms.methods.silobn import SiloBN
from fednorms.methods.sn import SN
from fednorms.methods.spherefed import SphereFed
from fednorms.methods.ws import WeightStandardisation

__all__ = [
    "AGC",
    "AGN",
    "FBN",
    "FRN",
    "HBN",
    "MOON",
    "PN",
    "RBN",
    "SN",
    "AdaBN",
    "Augment",
    "CentralDP",
    "Centralised",
    "Ditto",
    "FRAug",
    "FedAdagrad",
    "FedAdam",
    "FedAvgM",
    "FedBABU",
    "FedBN",
    "FedDC",
    "FedDyn",
    "FedEXP",
    "FedFA",
    "FedFN",
    "FedFR",
    "FedNorm",
    "FedNova",
    "FedPLVM",
    "FedPer",
    "FedProto",
    "FedProx",
    "FedRDN",
    "FedRep",
    "FedTAN",
    "FedYogi",
    "FineTune",
    "FixBN",
    "GReg",
    "GroupNorm",
    "InstanceNorm",
    "LGFedAvg",
    "LayerNorm",
    "LocalDP",
    "MixBN",
    "NoNorm",
    "PartialFed",
    "PerFedAvg",
    "Scaffold",
    "SiloBN",
    "SphereFed",
    "Standalone",
    "WSConv",
    "WeightNorm",
    "WeightStandardisation",
    "fednn",
    "fedwon",
]
