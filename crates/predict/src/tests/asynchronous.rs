//! Tests of the asynchronous units of sm_90a, with kernels that run as sketches.

use ptx::*;

use super::{RESOURCES, near};
use crate::machine::H200;
use crate::*;
use emu::trace::{CtaTrace, Detail};
use emu::{Buffer, Checks, Fidelity, Options};

/// The recorded CTAs of a kernel. Each parameter is a buffer of 64 KB.
fn sketched(text: &str, launch: Launch, ctas: &[u64]) -> (Module, Vec<CtaTrace>) {
    let module = parse(text).unwrap_or_else(|e| panic!("{e}"));
    let params = module.entries().next().map_or(0, |f| f.params.len());
    let spec = |i: usize| BufferSpec { name: format!("b{i}"), bytes: 1 << 16, access: Access::ReadWrite };
    let kernel = Kernel {
        module: module.clone().assume_verified(),
        entry: "k".into(),
        launch,
        buffers: (0..params).map(spec).collect(),
        tensor_maps: Vec::new(),
        args: (0..params).map(|index| Arg::Buffer { index, offset: 0 }).collect(),
    };
    let checks = Checks { races: false, uninitialised: false, unwritten: false };
    let options = Options {
        traced_ctas: ctas.to_vec(),
        only: Some(ctas.to_vec()),
        fidelity: Fidelity::Sketch,
        checks,
        ..Options::default()
    };
    let mut buffers: Vec<Buffer> = (0..params).map(|_| Buffer::zeroed(1 << 16)).collect();
    let report = emu::run(&kernel, &mut buffers.iter_mut().collect::<Vec<_>>(), &options)
        .unwrap_or_else(|e| panic!("{e}"));
    assert!(report.hazards.is_empty(), "{:?}", report.hazards);
    (module, report.traces)
}

fn launch(grid: u32, cluster: u32, threads: u32) -> Launch {
    let dim = |x| Dim3(x, 1, 1);
    Launch { cluster: dim(cluster), ..Launch::new(dim(grid), dim(threads)) }
}

fn predicted(text: &str, launch: Launch) -> Prediction {
    let (module, traces) = sketched(text, launch, &[0]);
    let subject = Subject {
        module: &module,
        launch: &launch,
        traced: launch.grid,
        traces: &traces,
        resources: &RESOURCES,
        footprint: 0,
        cache: CacheState::Warm,
    };
    predict(&subject, &H200).unwrap_or_else(|e| panic!("{e}"))
}

fn kernel(params: &str, body: &str) -> String {
    format!(
        ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k({params})\n{{\n.reg .pred %p<4>;\n\
         .reg .b32 %r<16>;\n.reg .b64 %rd<8>;\n.reg .f32 %f<64>;\n.shared .align 1024 .b8 tile[32768];\n\
         .shared .align 8 .b64 bar;\n{body}\nret;\n}}\n"
    )
}

/// `groups` groups of eight m64n64k16. After each group the kernel waits until `left` groups are left, then
/// executes `fma` dependent multiply-adds.
fn products(groups: usize, left: u32, fma: usize) -> String {
    let sums: Vec<String> = (0..32).map(|i| format!("%f{i}")).collect();
    let product = format!(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {{{}}}, %rd0, %rd1, 1, 1, 1, 0, 0;\n",
        sums.join(", ")
    );
    let group = format!(
        "wgmma.fence.sync.aligned;\n{}wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned {left};\n{}",
        product.repeat(8),
        "fma.rn.f32 %f0, %f0, %f0, %f0;\n".repeat(fma)
    );
    let body = format!(
        "mov.b32 %r0, tile;\nshr.u32 %r0, %r0, 4;\ncvt.u64.u32 %rd0, %r0;\nmov.b64 %rd1, %rd0;\n\
         {}wgmma.wait_group.sync.aligned 0;",
        group.repeat(groups)
    );
    kernel("", &body)
}

/// Clocks of an m64n64k16 of bf16: 131,072 operations at 4096 per clock.
const PRODUCT: f64 = 32.0;

#[test]
fn products_reach_the_dense_peak() {
    let p = predicted(&products(100, 1, 0), launch(1, 1, 128));
    near(p.cycles, 800.0 * PRODUCT, 0.02);
    near(p.utilisation.tensor, 1.0, 0.02);
    assert_eq!(p.bound, Bottleneck::Tensor);
    // If every SM is as busy as this one, the clock is the one that the power limit allows.
    let all = predicted(&products(100, 1, 0), launch(132, 1, 128));
    near(all.clock_mhz, H200.loaded_clock_mhz, 0.02);
    assert_eq!(p.clock_mhz, H200.clock_mhz);
}

/// Two warpgroups start together. The products of one run while the other computes, although nothing in the
/// kernel orders them.
#[test]
fn products_of_a_group_are_not_parted_by_another_warpgroup_s() {
    // A group takes 256 clocks; 64 dependent multiply-adds take the same.
    let p = predicted(&products(50, 0, 64), launch(1, 1, 256));
    near(p.cycles, 50.0 * 2.0 * 8.0 * PRODUCT, 0.12);
    // A single warpgroup waits for one after the other.
    let one = predicted(&products(50, 0, 64), launch(1, 1, 128));
    near(one.cycles, 50.0 * (8.0 * PRODUCT + 256.0), 0.12);
}

fn bulk_copy(bytes: u32) -> String {
    let body = format!(
        "ld.param.u64 %rd0, [from];\nmov.u32 %r0, tile;\nmov.u32 %r1, bar;\nmov.u32 %r2, %tid.x;\n\
         setp.ne.u32 %p0, %r2, 0;\n@%p0 bra END;\nmbarrier.init.shared::cta.b64 [%r1], 1;\n\
         fence.mbarrier_init.release.cluster;\nmbarrier.arrive.expect_tx.shared::cta.b64 _, [%r1], {bytes};\n\
         cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%r0], [%rd0], {bytes}, [%r1];\n\
         WAIT:\nmbarrier.try_wait.parity.shared::cta.b64 %p1, [%r1], 0;\n@!%p1 bra WAIT;\nEND:"
    );
    kernel(".param .u64 from", &body)
}

#[test]
fn a_bulk_copy_takes_its_latency_and_its_bytes() {
    let [short, long] = [4096, 32768].map(|bytes| predicted(&bulk_copy(bytes), launch(1, 1, 32)));
    near(long.cycles - short.cycles, 28672.0 / f64::from(H200.memory.l2_port), 0.05);
    let latency = H200.units.map_or(0.0, |u| f64::from(u.bulk_latency));
    assert!(short.cycles > latency && short.cycles < latency + 250.0, "{}", short.cycles);
    assert!(long.share(Cause::Mbarrier) > 0.2, "{:?}", long.split);
}

#[test]
fn a_barrier_of_a_cluster_takes_the_way_there() {
    let both = "barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;\n";
    let p = predicted(&kernel("", &both.repeat(40)), launch(2, 2, 64));
    let latency = H200.units.map_or(0.0, |u| f64::from(u.cluster_latency));
    near(p.cycles, 40.0 * latency, 0.10);
    assert!(p.share(Cause::Cluster) > 0.5, "{:?}", p.split);
}

/// CTAs take numbers from a counter until none is left. One CTA of a hundred takes a hundredth. Two CTAs with
/// different speeds share the numbers.
#[test]
fn a_sketch_gives_a_cta_its_share_of_a_counter() {
    let body = "ld.param.u64 %rd0, [counter];\nNEXT:\natom.global.add.u32 %r0, [%rd0], 1;\nsetp.lt.u32 %p0, %r0, 1000;\n\
                @%p0 bra NEXT;";
    let text = kernel(".param .u64 counter", body);
    let taken = |ctas: &[u64]| -> Vec<usize> {
        let (_, traces) = sketched(&text, launch(100, 1, 1), ctas);
        let atomics = |t: &CtaTrace| {
            t.warps[0].iter().filter(|e| matches!(e.detail, Detail::Cached(_)) && e.pc == 1).count()
        };
        traces.iter().map(atomics).collect()
    };
    // The last number that a CTA takes is beyond the end.
    assert_eq!(taken(&[0]), [11]);
    assert_eq!(taken(&[0, 50]).iter().sum::<usize>(), 20 + 2);
}
