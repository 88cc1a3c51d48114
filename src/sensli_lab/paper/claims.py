"""The paper's nine claims as data: what is claimed, the checks that weigh it, and further questions."""

from __future__ import annotations

from dataclasses import dataclass

from sensli_lab.paper import evidence
from sensli_lab.paper.evidence import BestTime, Cheaper, NewGradient, SamePlace, Separation, Smaller, ThresholdCheck

LOSS = ("train_loss",)
EARLY = (10, 50, 150, 450)


@dataclass(frozen=True)
class Question:
    """A further experiment, asked because a claim did not hold everywhere, and a sentence for each outcome."""

    text: str
    checks: tuple[evidence.Check, ...]
    yes: str  # every check confirmed
    partly: str
    no: str  # no check confirmed
    opposite: str = ""  # every check came out the other way; `no` where this is empty


@dataclass(frozen=True)
class Claim:
    name: str
    words: str
    checks: tuple[evidence.Check, ...]
    questions: tuple[Question, ...] = ()


C1 = Claim(
    "C1",
    "A network that grows (LI) ends with a lower loss and a lower test error than the network it started as, in "
    "every setting.",
    (
        Smaller("2", "FNN LI", "FNN1"),
        Smaller("3", "ResNet LI", "ResNet1"),
        Smaller("4", "FNN LI", "FNN1"),
        Smaller("13", "ResNet LI", "ResNet1"),
        Smaller("5", "CNN LI", "CNN1"),
    ),
)

C2 = Claim(
    "C2",
    "A network that grows beats the network that had the grown size from the start: the FNN with mini-batches "
    "(Exp4), the ResNet with three insertions (Exp13), the CNN of Exp1.",
    (Smaller("4", "FNN LI", "FNN2"), Smaller("13", "ResNet LI", "ResNet2"), Smaller("1", "CNN LI", "CNN")),
    (
        Question(
            "And where the paper does not claim it: full batch, one insertion?",
            (Smaller("2", "FNN LI", "FNN2", LOSS), Smaller("3", "ResNet LI", "ResNet2", LOSS)),
            "The grown network wins there too.",
            "It wins in some of these settings, which the paper does not claim.",
            "It does not, as the paper says.",
        ),
        Question(
            "Is the comparison unfair because the extended network spends more? Compare at equal FLOPs.",
            (
                Smaller("4", "FNN LI", "FNN2", LOSS, equal_cost=True),
                Smaller("13", "ResNet LI", "ResNet2", LOSS, equal_cost=True),
            ),
            "Yes: for the same FLOPs the grown network is ahead.",
            "In part: for the same FLOPs the grown network is ahead in some of these settings.",
            "No: the picture is the same for the same FLOPs.",
        ),
        Question(
            "Is the insertion too late? Grow earlier (FNN, full batch at learning rate 0.2, and mini-batch).",
            tuple(Smaller(name, f"LI@{time}", "FNN2", LOSS) for name in ("when-full", "when-mini") for time in EARLY),
            "Yes: grown early, the network beats the extended one.",
            "Time decides: some insertion times beat the extended network and others do not.",
            "Growing earlier narrows the gap, but no insertion time beats the extended network at the end of training.",
        ),
        Question(
            "And the ResNet with three insertions, grown earlier?",
            tuple(Smaller("when-resnet", f"LI@{time}", "ResNet2", LOSS) for time in (10, 50, 100)),
            "Grown early, it beats the extended network.",
            "Some insertion times and learning rates let it beat the extended network, others do not.",
            "No: at no insertion time and learning rate does it beat the extended network at the end of training.",
        ),
        Question(
            "Is it the dead units? The identity layer inherits every unit that is zero on all data. Wake them.",
            tuple(
                Smaller(name, f"LI@{time} wake", "FNN2", LOSS) for name in ("when-full", "when-mini") for time in EARLY
            ),
            "Yes: with its dead units woken, the grown network beats the extended one.",
            "In part: with its dead units woken, the grown network beats the extended one for some insertion times.",
            "No: with its dead units woken the grown network does not beat the extended one either. (Whether waking "
            "helps at all is examined at the end.)",
        ),
        Question(
            "Is it the initial seeds? Take only the runs whose small network had no dead unit when it grew. (The runs "
            "of the extended network are not selected: its own dead units stay in.)",
            tuple(Smaller("starts", f"LI@{time}", "FNN2", LOSS, dead=False) for time in (10, 50, 450)),
            "Yes: from a start without dead units the grown network beats the extended one.",
            "In part: from a start without dead units the grown network beats the extended one in some of these "
            "settings, and is level in the others.",
            "No: from a start without dead units the two are level.",
        ),
        Question(
            "And the runs that did have dead units when they grew: do they lose nothing?",
            tuple(Smaller("starts", f"LI@{time}", "FNN2", LOSS, dead=True) for time in (10, 50, 450)),
            "They win too.",
            "They win in some settings only.",
            "The difference is within the noise.",
            "They lose, and this is the most likely reason why the claim fails: an identity layer passes every dead "
            "unit on, so a small network that has lost units grows into a deep one that has lost them as well.",
        ),
        Question(
            "Does it depend on when one looks? Compare early in training.",
            tuple(
                Smaller("when-mini", f"LI@{time}", "FNN2", LOSS, epoch=epoch)
                for epoch in (300, 600)
                for time in (10, 50, 150)
            ),
            "Yes: early in training the grown network is ahead; by the end the extended one has caught up.",
            "Yes, in most cases: early in training a network grown early is ahead; by the end the extended one has "
            "caught up. Had the training been that short, the claim would have come out as confirmed.",
            "No: the grown network is not ahead then either.",
        ),
        Question(
            "Is it the learning rate?",
            (
                Smaller("rates-full", "FNN LI", "FNN2", LOSS),
                Smaller("rates-mini", "FNN LI", "FNN2", LOSS),
                Smaller("rates-resnet", "ResNet LI", "ResNet2", LOSS),
            ),
            "Yes: at other rates the grown network wins.",
            "In part: at some rates the grown network wins.",
            "No: at none of the other rates does the grown network win.",
        ),
        Question(
            "Is it the split of the data?",
            (Smaller("splits", "FNN LI", "FNN2", LOSS),),
            "Yes: on other splits the grown network wins.",
            "In part: on some splits the grown network wins.",
            "No: it is the same on other splits.",
        ),
    ),
)

C3 = Claim(
    "C3",
    "Growing is cheaper than training the extended network, in FLOPs everywhere and in time for Exp1 (71.5 %).",
    (
        Cheaper("2", "FNN LI", "FNN2"),
        Cheaper("3", "ResNet LI", "ResNet2"),
        Cheaper("4", "FNN LI", "FNN2"),
        Cheaper("13", "ResNet LI", "ResNet2"),
        Cheaper("5", "CNN LI", "CNN2"),
        Cheaper("1", "CNN LI", "CNN", time=True),
    ),
)

C4 = Claim(
    "C4",
    "The place with the largest merit is better than the one with the smallest: slightly for one insertion with "
    "full batches (Exp6, Exp7), hidden by noise for one insertion with mini-batches (Exp8, Exp9), clearly for three "
    "(Exp13, Exp14).",
    (
        Smaller("6", "SensLI", "LIother", LOSS),
        Smaller("7", "SensLI", "LIother", LOSS),
        Smaller("8", "SensLI", "LIother", LOSS, hidden=True),
        Smaller("13", "ResNet LI", "LIother", LOSS),
        Smaller("9", "SensLI", "LIother", LOSS, hidden=True),
        Smaller("14", "CNN LI", "CNN LIother", LOSS),
    ),
    (
        Question(
            "Were 30 runs too few? The same with 120.",
            (Smaller("where", "SensLI", "LIother", LOSS), Smaller("where-three", "ResNet LI", "LIother", LOSS)),
            "Yes: with 120 runs the largest merit is better in every setting.",
            "In part: with 120 runs the largest merit is better in some settings, and the others stay open.",
            "No: the difference stays within the noise with 120 runs as well.",
        ),
    ),
)

C5 = Claim(
    "C5",
    "For three insertions, the place with the largest merit is better than a random one.",
    (Smaller("13", "ResNet LI", "Random", LOSS), Smaller("14", "CNN LI", "CNN Random", LOSS)),
    (
        Question(
            "Were 30 runs too few? The same with 120.",
            (Smaller("where-three", "ResNet LI", "Random", LOSS),),
            "Yes: with 120 runs the largest merit is better.",
            "In part: with 120 runs it is better in one of the two recipes.",
            "No: the difference stays within the noise with 120 runs as well.",
        ),
    ),
)

C6 = Claim(
    "C6",
    "Among five norms of the kernel gradient, the operator norm separates the places of a CNN best.",
    (Separation("5", "CNN LI"),),
)

C7 = Claim(
    "C7",
    "The gradient of the new layer is of the order of the others': it neither vanishes nor explodes.",
    (NewGradient("4", "FNN LI"), NewGradient("5", "CNN LI")),
)

C8 = Claim(
    "C8",
    "Each of eight insertion times beats the baseline, and too late helps less. Best after 450 epochs in Exp10, the "
    "earlier the better in Exp11, little effect in Exp12.",
    (
        *(Smaller("10", f"LI@{time}", "FNN1", LOSS, recipes=("many",)) for time in range(150, 851, 100)),
        *(Smaller("11", f"LI@{time}", "FNN1", LOSS, recipes=("many",)) for time in range(50, 401, 50)),
        Smaller("10", "LI@150", "LI@850", LOSS, recipes=("many",)),
        Smaller("11", "LI@50", "LI@400", LOSS, recipes=("many",)),
        BestTime("10", (450,)),
        BestTime("11", (50,)),
        *(Smaller("12", f"LI@{time}", "CNN1", LOSS) for time in range(10, 81, 10)),
        Smaller("12", "LI@10", "LI@80", LOSS, hidden=True),
        SamePlace("12"),
    ),
    (
        Question(
            "Would growing earlier still be better? (Exp2 as run and Exp4, 60 runs.)",
            tuple(
                Smaller(name, f"LI@{early}", f"LI@{late}", LOSS)
                for name in ("when-full", "when-mini")
                for early, late in ((10, 150), (50, 150), (150, 450))
            ),
            "Yes: the earlier, the better.",
            "In part: earlier is better in some of these comparisons, and no clear loss in the others.",
            "No: before 450 epochs the time makes no clear difference.",
        ),
    ),
)

C9 = Claim(
    "C9",
    "The threshold tau = 1 accepts some insertions and rejects others (Exp1, Exp14). On the spirals the paper sets no "
    "threshold; here is what it would have done.",
    (
        *(ThresholdCheck(name, "CNN LI") for name in ("1", "14")),
        *(ThresholdCheck(name, f"{kind} LI") for name, kind in (("2", "FNN"), ("3", "ResNet"), ("4", "FNN"))),
        *(ThresholdCheck(name, "SensLI") for name in ("6", "7", "8")),
        ThresholdCheck("13", "ResNet LI"),
    ),
)

WAKE = Claim(
    "Waking dead units",
    "Waking the dead units of a new ReLU layer lowers the loss. (Not in the paper. A unit that is zero on all data "
    "gets random incoming weights in the new layer and zero outgoing weights after it: the function on the data "
    "stays, and the unit can learn.)",
    (Smaller("wake", "LI wake", "LI", LOSS),),
    (
        Question(
            "And in those runs alone that had dead units?",
            (Smaller("wake", "LI wake", "LI", LOSS, dead=True),),
            "It helps in every setting: worth offering as an option of the ReLU layer.",
            "It helps in some settings and does no clear harm in the others; it does not hold up over all of them, so "
            "it is an option of these experiments (`wake`), off in the paper's recipes, and not of the ReLU layer.",
            "It helps nowhere clearly.",
        ),
        Question(
            "Does it help more when the network grows earlier?",
            tuple(
                Smaller(name, f"LI@{time} wake", f"LI@{time}", LOSS, dead=True)
                for name in ("when-full", "when-mini")
                for time in EARLY
            ),
            "It helps at every time.",
            "It helps at some times.",
            "Not clearly: with 60 runs, about half of them with dead units, every difference is within the noise.",
        ),
    ),
)

RECYCLE = Claim(
    "Recycling dead units",
    "Giving all dead units new rows when the network grows lowers the loss. (Not in the paper. Units that are zero on all data get "
    "the rows of a fresh layer and zero outgoing weights, in the new layer and in the old ones: the function on the data stays.)",
    (Smaller("recycle", "LI recycled", "LI", LOSS),),
    (
        Question(
            "Does the grown network reach the extended one then (the comparison that claim C2 is about)?",
            (Smaller("recycle", "LI recycled", "FNN2", LOSS),),
            "Yes, in every setting.",
            "In some settings.",
            "No.",
        ),
        Question(
            "Does it need the growth, or does recycling alone help the small network?",
            (Smaller("recycle", "FNN1 recycled", "FNN1", LOSS),),
            "Recycling alone helps the small network in every setting.",
            "Recycling alone helps the small network in some settings.",
            "Recycling alone does not help the small network.",
        ),
        Question(
            "And the extended network, at the same time and equal in everything else?",
            (Smaller("recycle", "FNN2 recycled", "FNN2", LOSS),),
            "It helps there too, so it is not growing that makes the difference.",
            "It helps there in some settings.",
            "It does not help there.",
        ),
    ),
)

CLAIMS = (C1, C2, C3, C4, C5, C6, C7, C8, C9)
