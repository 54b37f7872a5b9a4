"""What is read from a listing of machine code: its loops, and matrix products that wait."""

from megatron.kernels.tools import listing

CHAIN = """
.L_x_4:
        /*0100*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR24+0x18000], R10 ;
        /*0110*/              @!P0 BRA `(.L_x_2) ;
.L_x_10:
        /*0120*/                   WARPGROUP.ARRIVE ;
        /*0130*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR16], RZ, !UPT{0} ;
        /*0150*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR4], R88{0} ;
        /*0170*/                   UMOV UR4, UR6 ;
        /*0180*/                   HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], R88, gsb0 ;
        /*0190*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*01a0*/                   MUFU.EX2 R88, R88 ;
        /*01b0*/                   LDL R5, [R1+0x8] ;
        /*01c0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*01d0*/                   HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR4].tnspB, R24{0} ;
        /*01f0*/                   HGMMA.64x128x16.F32.BF16 R24, R92, gdesc[UR4].tnspB, R24, gsb0 ;
        /*0200*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0210*/               @P1 BRA `(.L_x_4) ;
"""
EDGES = CHAIN.replace("_4", "_8").replace("_2)", "_6)").replace("_10", "_12")
EDGES = EDGES.replace(
    "MUFU.EX2 R88, R88", "FSEL R88, R88, -INF , P2 ;\n /*01a8*/ FSEL R88, R88, RZ, P3"
)
PROGRAM = f"""
.text.kernel:
        /*0000*/                   LDG.E R1, desc[UR4][R2.64] ;
{EDGES}
        /*0220*/               @P2 BRA `(.L_x_5) ;
{CHAIN}
.L_x_5:
        /*0220*/                   EXIT ;
.L_x_2:
        /*0230*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR24+0x18000], R10 ;
        /*0240*/              @!P0 BRA `(.L_x_2) ;
        /*0250*/                   BRA `(.L_x_10) ;
.L_x_6:
        /*0260*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR24+0x18000], R10 ;
        /*0270*/              @!P0 BRA `(.L_x_6) ;
        /*0280*/                   BRA `(.L_x_12) ;
.L_x_14:
        /*0290*/                   BRA `(.L_x_14);
"""
WAIT = ", gsb0 ;\n /*0140*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n /*0148*/ WARPGROUP.ARRIVE"


def test_the_hot_loop_is_the_one_over_whole_blocks():
    wanted = {"hot_instructions": 15, "hot_cp_async": 0, "hot_barriers": 1, "hot_spill_loads": 1}
    facts = listing.facts(PROGRAM.format(""))
    assert facts == {"serialised": 0, **wanted}
    # in whatever order the two loops come
    first, second = PROGRAM.find(EDGES), PROGRAM.find(CHAIN)
    turned = PROGRAM[:first] + CHAIN + PROGRAM[first + len(EDGES) : second] + EDGES
    assert listing.facts((turned + PROGRAM[second + len(CHAIN) :]).format("")) == facts
    # a loop around both is not what is counted
    back = " /*0218*/ @P3 BRA `(.L_x_9) ;\n"
    around = PROGRAM.replace(".L_x_5:\n", f".L_x_5:\n{back}")
    around = around.replace(EDGES, f".L_x_9:\n /*0008*/ MOV R1, R2 ;\n{EDGES}")
    assert listing.facts(around.format("")) == facts


def test_a_wait_within_a_sum_is_serialised_and_one_after_it_is_not():
    assert listing.serialised(PROGRAM.format("")) == 0
    assert listing.serialised(PROGRAM.format(WAIT)) == 6
    # two sums at once
    turns = [f" HGMMA.64x64x16.F32.BF16 R{24 + 32 * (at % 2)}" for at in range(6)]
    code = [f" /*00{at}0*/ {turn}, gdesc[UR4],{turn[-4:]}" for at, turn in enumerate(turns)]
    wait = ";\n /*0090*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n"
    assert listing.serialised(" ;\n".join(code) + wait) == 0
    assert listing.serialised(wait.join(code) + wait) == 4
    # all but the newest: what is waited for is not this sum
    assert listing.serialised(wait.replace("0x0", "0x1").join(code)) == 0


def test_exponentials_beside_a_product_are_counted():
    """The chain's only one comes after the wait for all products; moved before it, it counts."""
    assert listing.overlapped(PROGRAM.format("")) == 0
    exponential = "        /*01a0*/                   MUFU.EX2 R88, R88 ;\n"
    wait = "        /*0190*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;\n"
    assert CHAIN.count(wait + exponential) == 1
    assert listing.overlapped(CHAIN.replace(wait + exponential, exponential + wait)) == 1
    # a wait for all but one leaves a product under way
    partial = wait.replace("0x0", "0x1")
    assert listing.overlapped(CHAIN.replace(wait + exponential, partial + exponential)) == 1


def test_an_arrival_needs_a_barrier_after_the_wait_for_products():
    wait, barrier, arrival = (
        f" /*00{at}0*/ {text} ;\n"
        for at, text in enumerate(
            (
                "WARPGROUP.DEPBAR.LE gsb0, 0x1",
                "BAR.SYNC.DEFER_BLOCKING 0x2, 0x80",
                "@!P0 SYNCS.ARRIVE.TRANS64 RZ, [UR4+0x30180], RZ",
            )
        )
    )
    assert listing.unguarded(wait + barrier + arrival) == 0
    assert listing.unguarded(wait + arrival) == listing.unguarded(barrier + wait + arrival) == 1
    assert listing.unguarded(arrival + wait + barrier) == 0
    # by one way into a block there is a barrier, by the other one there is not
    skip = " /*0030*/ @P1 BRA `(.L_x_1) ;\n"
    assert listing.unguarded(wait + skip + barrier + ".L_x_1:\n" + arrival) == 1
    assert listing.unguarded(skip + wait + barrier + ".L_x_1:\n" + arrival) == 0
    # a wait at the end of a loop, an arrival at its beginning
    back = " /*0040*/ @P1 BRA `(.L_x_2) ;\n"
    assert listing.unguarded(".L_x_2:\n" + arrival + wait + back) == 1
    assert listing.unguarded(".L_x_2:\n" + arrival + wait + barrier + back) == 0
