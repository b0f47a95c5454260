use crate::{
    AtomicOp, Builder, BulkOptions, CmpOp, F32, Half, Major, MatrixOrder, Pointer, R16, R32, R64, SpecialReg,
    Target, Type, Version,
};

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
fn four_bytes_are_packed_from_the_lowest_on() {
    let text = body(|k| {
        let values: [F32; 4] = k.regs();
        k.pack_e4m3(values);
    });
    for line in [
        "cvt.rn.satfinite.e4m3x2.f32 %h0, %f1, %f0;",
        "cvt.rn.satfinite.e4m3x2.f32 %h1, %f3, %f2;",
        "mov.b32 %r0, {%h0, %h1};",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
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

/// One CTA of a pair loads a tile for both CTAs, multiplies, sends an accumulator to the other CTA and stores
/// a box.
fn hopper() -> Builder {
    let mut k = Builder::kernel("t");
    let (map, out) = (k.param_tensor_map("map"), k.param_pointer("out"));
    k.max_threads(128);
    let tile = k.dynamic_shared(1024);
    let bar = k.shared_array("bar", 8, 8);
    let warp = k.warp_index_uniform();
    let first = k.setp_u(CmpOp::Eq, warp, 0);
    k.prefetch_tensor_map(map);
    k.guarded(first, |k| k.mbarrier_init(bar, 1));
    k.fence_mbarrier_init();
    k.cluster_arrive_relaxed();
    k.cluster_wait();
    k.setmaxnreg_dec(232);
    k.griddep_wait();
    let one = k.elect(u32::MAX);
    let both = k.mov::<R16>(3);
    k.guarded(one, |k| {
        k.mbarrier_arrive_expect_tx(bar, 8192);
        let options = BulkOptions { multicast: Some(both), policy: None };
        k.tma_load(tile, map, &[0.into(), warp.into()], bar, options);
    });
    k.mbarrier_wait_parity(bar, 0);
    k.griddep_launch_dependents();
    let (a, b): (R64, R64) = (k.mov(0), k.mov(0));
    let sums: [F32; 4] = k.regs();
    k.wgmma_fence();
    k.wgmma_ss([Type::F16; 2], &sums, (a, Major::K), (b, Major::Mn), false, false);
    k.wgmma_rs([Type::Bf16; 2], &sums, [warp; 4], (b, Major::K), first);
    k.wgmma_ss([Type::E4m3, Type::E5m2], &sums, (a, Major::K), (b, Major::K), true, true);
    k.wgmma_commit();
    k.wgmma_wait(0);
    k.named_barrier_arrive(warp, 64);
    k.named_barrier_sync(2, 64);
    let (there, there_bar) = (k.mapa(tile.at(64), 1), k.mapa(bar, 1));
    k.st_async_vec(there, sums, there_bar);
    k.mbarrier_arrive(there_bar);
    k.fence_proxy_async_shared();
    k.st_async(there, warp, there_bar);
    k.bulk_send(there, tile, 128, there_bar);
    k.mbarrier_expect_tx(bar, 256);
    k.bulk_load(tile, out, 256, bar, BulkOptions::default());
    k.mbarrier_inval(bar);
    k.tma_store(map, &[0.into(), warp.into()], tile);
    k.tma_reduce(AtomicOp::Add, map, &[0.into(), warp.into()], tile);
    k.bulk_store(out, tile, 64);
    k.bulk_commit();
    k.bulk_wait_read(0);
    k.cluster_arrive();
    k
}

#[test]
fn a_kernel_of_sm_90a_says_what_it_was_told() {
    let module = hopper().into_verified(Target::sm_a(90)).unwrap_or_else(|violations| panic!("{violations}"));
    assert_eq!(module.version, Version { major: 8, minor: 1 });
    let text = module.to_string();
    for line in [
        ".target sm_90a",
        ".param .align 64 .b8 map[128]",
        "mov.u64 %rd0, map;",
        "cvta.param.u64 %rd1, %rd0;",
        "shfl.sync.idx.b32 %r4, %r3, 0, 31, 4294967295;",
        "@%p0 mbarrier.init.shared.b64 [%r1], 1;",
        "elect.sync _|%p1, 4294967295;",
        "@%p1 mbarrier.arrive.expect_tx.shared.b64 _, [%r1], 8192;",
        "@%p1 cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%r0], \
         [%rd1, {0, %r4}], [%r1], %h0;",
        "mbarrier.try_wait.parity.shared.b64 %p2, [%r1], 0;",
        "@!%p2 bra $L0_do;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%f0, %f1, %f2, %f3}, %rd4, %rd5, 0, 1, 1, 0, 1;",
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f0, %f1, %f2, %f3}, {%r4, %r4, %r4, %r4}, %rd5, %p0, 1, 1, 0;",
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e5m2 {%f0, %f1, %f2, %f3}, %rd4, %rd5, 1, -1, 1;",
        "bar.arrive %r4, 64;",
        "bar.sync 2, 64;",
        "mapa.shared::cluster.u32 %r5, %r0, 1;",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%r5+64], {%f0, %f1, %f2, %f3}, [%r6];",
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r6];",
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%r5+64], %r4, [%r6];",
        "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%r5+64], [%r0], 128, [%r6];",
        "mbarrier.expect_tx.shared.b64 [%r1], 256;",
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%rd3], 256, [%r1];",
        "mbarrier.inval.shared.b64 [%r1];",
        "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%rd1, {0, %r4}], [%r0];",
        "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {0, %r4}], [%r0];",
        "cp.async.bulk.global.shared::cta.bulk_group [%rd3], [%r0], 64;",
    ] {
        assert!(text.contains(line), "{line}\n{text}");
    }
}
