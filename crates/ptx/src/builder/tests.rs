use crate::{AtomicOp, Builder, CmpOp, F32, Half, MatrixOrder, Pointer, R32, SpecialReg, Target, Version};

/// The statements of a kernel's body, as printed.
fn body(build: impl FnOnce(&mut Builder)) -> String {
    let mut k = Builder::kernel("t");
    build(&mut k);
    let text = k.into_module(Target::sm(80)).to_string();
    let code = text.lines().filter(|line| !line.contains(".reg"));
    let start = code.clone().position(|line| line == "{").expect("a body");
    code.skip(start + 1).map(str::trim).collect::<Vec<_>>().join("\n")
}

#[test]
fn branches_jump_over_what_does_not_run() {
    let text = body(|k| {
        let lane = k.special(SpecialReg::LaneId);
        let first = k.setp_u(CmpOp::Eq, lane, 0);
        k.if_else(first, |k| k.mov_to(lane, 1), |k| k.mov_to(lane, 2));
    });
    let expected = "\
mov.u32 %r0, %laneid;
setp.eq.u32 %p0, %r0, 0;
@!%p0 bra $L0_else;
mov.b32 %r0, 1;
bra $L1_endif;
$L0_else:
mov.b32 %r0, 2;
$L1_endif:
ret;
}";
    assert_eq!(text, expected);
}

#[test]
fn loops_test_before_the_first_round_and_after_each() {
    let text = body(|k| {
        let sum: R32 = k.mov(0);
        k.for_range(0, 10, 2, |k, i| k.add_to(sum, sum, i));
    });
    let expected = "\
mov.b32 %r0, 0;
mov.b32 %r1, 0;
setp.ge.s32 %p0, %r1, 10;
@%p0 bra $L1_endfor;
$L0_for:
add.s32 %r0, %r0, %r1;
add.s32 %r1, %r1, 2;
setp.lt.s32 %p1, %r1, 10;
@%p1 bra $L0_for;
$L1_endfor:
ret;
}";
    assert_eq!(text, expected);
}

#[test]
fn guards_cover_their_body_and_nothing_after() {
    let text = body(|k| {
        let at = k.shared_array("s", 16, 64);
        let lane = k.special(SpecialReg::LaneId);
        let low = k.setp_u(CmpOp::Lt, lane, 16);
        k.guarded(!low, |k| k.st(at.at(4), lane));
        let _: R32 = k.atom(AtomicOp::Add, at, 1);
    });
    assert!(text.contains("@!%p0 st.shared.b32 [%r0+4], %r1;"), "{text}");
    assert!(text.contains("\natom.relaxed.cta.shared.add.u32 %r2, [%r0], 1;"), "{text}");
}

#[test]
fn packing_puts_the_first_in_the_lower_half() {
    let text = body(|k| {
        let (low, high): (F32, F32) = (k.mov(1.0f32), k.mov(2.0f32));
        k.pack(Half::Bf16, low, high);
    });
    assert!(text.contains("cvt.rn.bf16x2.f32 %r0, %f1, %f0;"), "{text}");
}

#[test]
fn wmma_loads_multiplies_and_stores() {
    let text = body(|k| {
        let at = k.dynamic_shared(4096);
        let a = k.wmma_load_a(MatrixOrder::Row, at, 64);
        let b = k.wmma_load_b(MatrixOrder::Col, at.at(2048), 64);
        let c: [F32; 8] = std::array::from_fn(|_| k.mov(0.0f32));
        k.wmma(c, (a, MatrixOrder::Row), (b, MatrixOrder::Col));
        k.wmma_store(MatrixOrder::Row, at, c, 32);
    });
    for line in [
        "wmma.load.a.sync.aligned.row.m16n16k16.shared.f16 {%r1, %r2, %r3, %r4, %r5, %r6, %r7, %r8}, [%r0], 64;",
        "wmma.load.b.sync.aligned.col.m16n16k16.shared.f16 {%r9, %r10, %r11, %r12, %r13, %r14, %r15, %r16}, [%r0+2048], 64;",
        "wmma.mma.sync.aligned.row.col.m16n16k16.f32.f32 {%f0,",
        "wmma.store.d.sync.aligned.row.m16n16k16.shared.f32 [%r0], {%f0, %f1, %f2, %f3, %f4, %f5, %f6, %f7}, 32;",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
}

#[test]
fn the_version_is_the_lowest_that_knows_the_kernel() {
    let version = |target, build: fn(&mut Builder)| {
        let mut k = Builder::kernel("t");
        build(&mut k);
        k.into_module(Target::sm(target)).version
    };
    let stores_matrix = |k: &mut Builder| {
        let at = k.dynamic_shared(16);
        let r = k.mov(0);
        k.stmatrix(at, [r]);
    };
    assert_eq!(version(80, |_| {}), Version { major: 7, minor: 0 });
    assert_eq!(version(80, stores_matrix), Version { major: 7, minor: 8 });
    assert_eq!(version(89, |_| {}), Version { major: 7, minor: 8 });
    assert_eq!(version(120, |_| {}), Version { major: 8, minor: 7 });
}
