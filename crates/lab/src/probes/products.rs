//! Products of a warpgroup, alone and with other work of the same warps under them: whether accumulators, which a product
//! reads and writes in the register file, slow what runs beside them.

use ptx::{Builder, F32, Half, Major, R64};

use super::list::probe;
use super::{Bench, Kind, Probe};

/// Chains of the work beside a product, enough for one warp to fill a pipe.
const CHAINS: usize = 8;
/// A descriptor without swizzle, but for its address: cores of 128 bytes, the two of K side by side (PTX ISA, "Matrix descriptor").
const LAYOUT: u64 = (256 >> 4 << 32) | (128 >> 4 << 16);

/// Where a product's A comes from.
#[derive(Clone, Copy)]
enum Source {
    Registers,
    Shared,
}

/// Work beside a product: an operation on one of the chains.
type Unit = fn(&mut Builder, F32, F32);

/// Every probe of products: for sm_90a alone.
pub(super) fn products() -> Vec<Probe> {
    let nothing: Unit = |_, _, _| {};
    let fma: Unit = |k, x, one| k.mad_to(x, x, one, one);
    let max: Unit = |k, x, one| {
        k.add_to(x, x, one);
        k.max_to(x, x, one);
    };
    let ex2: Unit = |k, x, _| k.ex2_to(x, x);
    // In the 64 clocks of an m64n128k16 a scheduler has 64 slots: these take three quarters of them, or of a pipe.
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

/// Of one warpgroup.
fn rate(name: &str, code: impl Fn(&mut Bench) + Sync + 'static) -> Probe {
    Probe { warps: 4, ..probe(name, Kind::Rate, code) }
}

/// Products of which the next is issued while one runs, with `count` other operations each.
fn timed<const SUMS: usize>(b: &mut Bench, source: Source, count: usize, unit: Unit) {
    let (sums, x, a, one) = (b.floats::<SUMS>(), b.floats::<CHAINS>(), b.integers::<4>(), b.one);
    let matrix = descriptor(b);
    b.k.fence_proxy_async();
    b.repeat(|k, _| {
        k.wgmma_fence();
        match source {
            Source::Registers => k.wgmma_rs(Half::F16, &sums, a, (matrix, Major::K), true),
            Source::Shared => k.wgmma_ss(Half::F16, &sums, (matrix, Major::K), (matrix, Major::K), true),
        }
        k.wgmma_commit();
        (0..count).for_each(|i| unit(k, x[i % CHAINS], one));
        k.wgmma_wait(1);
    });
    b.k.wgmma_wait(0);
    b.keep_all_f(&sums);
    b.keep_all_f(&x);
}

/// Products of which each is waited for.
fn waited(b: &mut Bench) {
    let (sums, matrix) = (b.floats::<4>(), descriptor(b));
    b.k.fence_proxy_async();
    b.repeat(|k, _| {
        k.wgmma_fence();
        k.wgmma_ss(Half::F16, &sums, (matrix, Major::K), (matrix, Major::K), true);
        k.wgmma_commit();
        k.wgmma_wait(0);
    });
    b.keep_all_f(&sums);
}

/// Of a matrix at the start of shared memory.
fn descriptor(b: &mut Bench) -> R64 {
    let (base, k) = (b.shared.base, &mut b.k);
    let address = k.shr_u(base, 4);
    let address = k.zext(address);
    k.add(address, LAYOUT)
}
