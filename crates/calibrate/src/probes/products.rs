//! Probes of `wgmma`, alone and together with other work of the same warps. They show whether accumulators,
//! which a product reads and writes in the register file, slow this work down.

use ptx::{Builder, F32, Major, R64, Type};

use super::{Bench, Kind, Probe, probe};

/// Chains of the work that runs while a product is computed, enough for one warp to fill a pipe.
const CHAINS: usize = 8;
/// A descriptor without swizzle and address: cores of 128 bytes, the two along K side by side (PTX ISA,
/// "Matrix descriptor").
const LAYOUT: u64 = (256 >> 4 << 32) | (128 >> 4 << 16);

#[derive(Clone, Copy)]
enum Source {
    Registers,
    Shared,
}

/// An operation on one of the chains, which runs while a product is computed.
type Unit = fn(&mut Builder, F32, F32);

/// Every probe of products. They need sm_90a.
pub(super) fn products() -> Vec<Probe> {
    let nothing: Unit = |_, _, _| {};
    let fma: Unit = |k, x, one| k.mad_to(x, x, one, one);
    let max: Unit = |k, x, one| {
        k.add_to(x, x, one);
        k.max_to(x, x, one);
    };
    let ex2: Unit = |k, x, _| k.ex2_to(x, x);
    // A scheduler has 64 issue slots in the 64 clocks of an m64n128k16. These units take three quarters of
    // them, or of a pipe.
    vec![
        rate("wgmma.m64n8k16 rate", move |b| timed::<4>(b, Source::Shared, 0, nothing)),
        rate("wgmma.m64n64k16 rate", move |b| timed::<32>(b, Source::Shared, 0, nothing)),
        rate("wgmma.m64n128k16 rate", move |b| timed::<64>(b, Source::Shared, 0, nothing)),
        rate("wgmma.m64n64k16 rate, A in registers", move |b| timed::<32>(b, Source::Registers, 0, nothing)),
        rate("wgmma.m64n128k16 rate, A in registers", move |b| timed::<64>(b, Source::Registers, 0, nothing)),
        rate("wgmma.m64n128k16 rate, 48 fma beside", move |b| timed::<64>(b, Source::Shared, 48, fma)),
        rate("wgmma.m64n128k16 rate, 16 fadd fmnmx beside", move |b| timed::<64>(b, Source::Shared, 16, max)),
        rate("wgmma.m64n128k16 rate, 6 ex2 beside", move |b| timed::<64>(b, Source::Shared, 6, ex2)),
        Probe { warps: 4, ..probe("wgmma.m64n8k16 chain", Kind::Latency, waited) },
    ]
}

/// A rate probe of one warpgroup.
fn rate(name: &str, code: impl Fn(&mut Bench) + Sync + 'static) -> Probe {
    Probe { warps: 4, ..probe(name, Kind::Rate, code) }
}

/// Products that are issued while the previous one runs, with `count` other operations each.
fn timed<const SUMS: usize>(b: &mut Bench, source: Source, count: usize, unit: Unit) {
    let (sums, x, a, one) = (b.floats::<SUMS>(), b.floats::<CHAINS>(), b.integers::<4>(), b.one);
    let matrix = descriptor(b);
    b.k.fence_proxy_async();
    b.repeat(|k, _| {
        k.wgmma_fence();
        match source {
            Source::Registers => k.wgmma_rs([Type::F16; 2], &sums, a, (matrix, Major::K), true),
            Source::Shared => {
                k.wgmma_ss([Type::F16; 2], &sums, (matrix, Major::K), (matrix, Major::K), true, false)
            }
        }
        k.wgmma_commit();
        (0..count).for_each(|i| unit(k, x[i % CHAINS], one));
        k.wgmma_wait(1);
    });
    b.k.wgmma_wait(0);
    b.keep_all_f(&sums);
    b.keep_all_f(&x);
}

/// Products with a wait after each.
fn waited(b: &mut Bench) {
    let (sums, matrix) = (b.floats::<4>(), descriptor(b));
    b.k.fence_proxy_async();
    b.repeat(|k, _| {
        k.wgmma_fence();
        k.wgmma_ss([Type::F16; 2], &sums, (matrix, Major::K), (matrix, Major::K), true, false);
        k.wgmma_commit();
        k.wgmma_wait(0);
    });
    b.keep_all_f(&sums);
}

/// The descriptor of a matrix at the start of shared memory.
fn descriptor(b: &mut Bench) -> R64 {
    let (base, k) = (b.shared.base, &mut b.k);
    let address = k.shr_u(base, 4);
    let address = k.zext(address);
    k.add(address, LAYOUT)
}
