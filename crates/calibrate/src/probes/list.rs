//! The list of probes.

use predict::Gpu;
use ptx::{
    AtomicOp, Builder, CacheOp, CmpOp, FloatMods, Global, Half, MemSem, Memory, Op, Operand, Pointer, R16,
    R32, R64, Rounding, Shared, Space, SpecialReg, Target, TernaryOp, Type, UnaryOp, Value,
};

use super::bench::SHARED;
use super::products::products;
use super::{Bench, Chain, Kind, MANY, Probe, probe};

/// Independent chains of a warp in such a CTA.
const CHAINS: usize = 4;
/// Size of a data buffer that exceeds every cache, bytes.
const FAR: usize = 256 << 20;

/// Every probe of a target, grouped by subject.
pub fn all(target: Target) -> Vec<Probe> {
    let products = if target == Target::sm_a(90) { products() } else { Vec::new() };
    let subjects =
        [arithmetic(), exchanges(), shared(), caches(), tensor(), products, barriers(), loops(), bandwidth()];
    subjects.into_iter().flatten().collect()
}

/// A latency and a rate probe for an operation from f32 to f32.
fn floats(name: &str, unit: impl Fn(&mut Builder, ptx::F32, ptx::F32) + Sync + Copy + 'static) -> [Probe; 2] {
    let chain = move |b: &mut Bench| {
        let ([x], one) = (b.floats(), b.one);
        b.repeat(|k, _| unit(k, x, one));
        b.keep_f(x);
    };
    let rate = move |b: &mut Bench| {
        let (x, one) = (b.floats::<CHAINS>(), b.one);
        b.repeat(|k, n| unit(k, x[n as usize % CHAINS], one));
        b.keep_all_f(&x);
    };
    [probe(format!("{name} chain"), Kind::Latency, chain), probe(format!("{name} rate"), Kind::Rate, rate)]
}

/// A latency and a rate probe for integers. The third argument is a value that the compiler does not know.
fn integers(name: &str, unit: impl Fn(&mut Builder, R32, R32) + Sync + Copy + 'static) -> [Probe; 2] {
    let chain = move |b: &mut Bench| {
        let ([x], other) = (b.integers(), b.rounds);
        b.repeat(|k, _| unit(k, x, other));
        b.keep(x);
    };
    let rate = move |b: &mut Bench| {
        let (x, other) = (b.integers::<CHAINS>(), b.rounds);
        b.repeat(|k, n| unit(k, x[n as usize % CHAINS], other));
        b.keep_all(&x);
    };
    [probe(format!("{name} chain"), Kind::Latency, chain), probe(format!("{name} rate"), Kind::Rate, rate)]
}

fn unary(k: &mut Builder, op: UnaryOp, mods: FloatMods, x: ptx::F32) {
    k.op(Op::Unary(op, Type::F32, mods), [x, x].map(|r| Operand::Reg(r.reg())));
}

fn arithmetic() -> Vec<Probe> {
    let approx = FloatMods { ftz: false, ..FloatMods::APPROX_FTZ };
    let half2 = |k: &mut Builder, x: R32, y: R32| {
        let op = Op::Ternary(TernaryOp::Fma, Type::F16x2, FloatMods::RN);
        k.op(op, [x, x, y, x].map(|r| Operand::Reg(r.reg())));
    };
    let all = [
        floats("fma", |k, x, one| k.mad_to(x, x, one, one)),
        floats("fadd", |k, x, one| k.add_to(x, x, one)),
        floats("fmul", |k, x, one| k.mul_to(x, x, one)),
        floats("fadd fmnmx", |k, x, one| {
            k.add_to(x, x, one);
            k.max_to(x, x, one);
        }),
        floats("ex2.ftz", |k, x, _| unary(k, UnaryOp::Ex2, FloatMods::APPROX_FTZ, x)),
        floats("fmul ex2", move |k, x, one| {
            // The product keeps the compiler from assuming that no argument is subnormal.
            k.mul_to(x, x, one);
            unary(k, UnaryOp::Ex2, approx, x);
        }),
        floats("rsqrt.ftz", |k, x, _| unary(k, UnaryOp::Rsqrt, FloatMods::APPROX_FTZ, x)),
        floats("tanh", move |k, x, _| unary(k, UnaryOp::Tanh, approx, x)),
        floats("div.rn", |k, x, one| k.div_to(x, x, one)),
        floats("cvt f32 f16 f32 fadd", |k, x, one| {
            let half = k.from_f32(Half::F16, x);
            let back = k.to_f32(Half::F16, half);
            k.add_to(x, back, one);
        }),
        floats("cvt f32 s32 f32", |k, x, _| {
            let whole = k.f32_to_s32(Rounding::Rn, x);
            let back = k.s32_to_f32(whole);
            k.mov_to(x, back);
        }),
        integers("imad", |k, x, other| k.mad_to(x, x, other, other)),
        integers("iadd lop3", |k, x, other| {
            k.add_to(x, x, other);
            k.xor_to(x, x, other);
        }),
        integers("lop3 shf", |k, x, other| {
            k.xor_to(x, x, other);
            let right = k.funnel_right(x, other, 3);
            k.mov_to(x, right);
        }),
        integers("setp selp", |k, x, other| {
            let less = k.setp_u(CmpOp::Lt, x, other);
            k.selp_to(x, other, 7, less);
        }),
        integers("setp guarded iadd", |k, x, other| {
            let less = k.setp_u(CmpOp::Lt, x, other);
            k.guarded(less, |k| k.add_to(x, x, other));
        }),
        integers("hfma2", half2),
    ];
    all.into_iter().flatten().collect()
}

fn exchanges() -> Vec<Probe> {
    let mut all = Vec::from(integers("shfl", |k, x, _| {
        let other = k.shfl_xor(x, 1);
        k.mov_to(x, other);
    }));
    all.extend(integers("setp ballot", |k, x, other| {
        let less = k.setp_u(CmpOp::Lt, x, other);
        let votes = k.ballot(less);
        k.mov_to(x, votes);
    }));
    all.extend(integers("redux", |k, x, _| {
        let op = Op::Redux { op: ptx::ReduxOp::Add, ty: Type::U32, abs: false, nan: false };
        k.op(op, [Operand::Reg(x.reg()), Operand::Reg(x.reg()), Operand::Imm(ptx::Imm::Int(0xFFFF_FFFF))]);
    }));
    all
}

/// A volatile load, which the compiler neither merges nor moves out of the loop.
fn volatile<const N: usize>(k: &mut Builder, to: [R32; N], from: Shared) {
    let mut memory = Memory::vector(Space::Shared, Type::B32, N as u8);
    memory.sem = MemSem::Volatile;
    k.op(Op::Ld(memory), [operand(&to), Operand::Address(from.address())]);
}

/// Registers as the data of a load or a store.
fn operand(registers: &[R32]) -> Operand {
    match registers {
        [one] => Operand::Reg(one.reg()),
        several => Operand::Vector(several.iter().map(|r| Operand::Reg(r.reg())).collect()),
    }
}

fn shared() -> Vec<Probe> {
    let mut all = vec![
        probe("ld.shared.b32 chain", Kind::Latency, |b| shared_chase::<1>(b, 1)),
        probe("ld.shared.v2 chain", Kind::Latency, |b| shared_chase::<2>(b, 2)),
        probe("ld.shared.v4 chain", Kind::Latency, |b| shared_chase::<4>(b, 4)),
        probe("st.shared ld.shared chain", Kind::Latency, |b| {
            let at = b.k.shared_index(b.shared, b.thread, 4);
            let [x] = b.integers();
            b.repeat(|k, _| {
                k.st(at, x);
                volatile(k, [x], at);
            });
            b.keep(x);
        }),
        probe("atom.shared.add chain", Kind::Latency, |b| {
            let at = b.k.shared_index(b.shared, b.thread, 4);
            let [x] = b.integers::<1>();
            b.repeat(|k, _| {
                let old = k.atom(AtomicOp::Add, at, x);
                k.mov_to(x, old);
            });
            b.keep(x);
        }),
        probe("atom.shared.add one address", Kind::Latency, |b| {
            let (at, [x]) = (b.shared, b.integers::<1>());
            b.repeat(|k, _| {
                let old = k.atom(AtomicOp::Add, at, x);
                k.mov_to(x, old);
            });
            b.keep(x);
        }),
    ];
    for ways in [2, 4, 8, 16, 32] {
        let code = move |b: &mut Bench| shared_chase::<1>(b, ways);
        all.push(probe(format!("ld.shared.b32 chain, {ways} ways"), Kind::Latency, code));
    }
    for warps in [1, 4, MANY] {
        let load = |ways: u32| move |b: &mut Bench| shared_loads::<1>(b, ways);
        for ways in [1, 2, 4, 8, 32] {
            let name = format!("ld.shared.b32 rate, {ways} ways, {warps} warps");
            all.push(Probe { warps, ..probe(name, Kind::Rate, load(ways)) });
        }
        let wide = |b: &mut Bench| shared_loads::<2>(b, 2);
        all.push(Probe { warps, ..probe(format!("ld.shared.v2 rate, {warps} warps"), Kind::Rate, wide) });
        let wide = |b: &mut Bench| shared_loads::<4>(b, 4);
        all.push(Probe { warps, ..probe(format!("ld.shared.v4 rate, {warps} warps"), Kind::Rate, wide) });
        let same = |b: &mut Bench| shared_loads::<1>(b, 0);
        all.push(Probe {
            warps,
            ..probe(format!("ld.shared.b32 broadcast, {warps} warps"), Kind::Rate, same)
        });
        let same = |b: &mut Bench| shared_loads::<4>(b, 0);
        all.push(Probe {
            warps,
            ..probe(format!("ld.shared.v4 broadcast, {warps} warps"), Kind::Rate, same)
        });
        for ways in [1, 2, 4, 8] {
            let store = move |b: &mut Bench| shared_stores::<1>(b, ways);
            let name = format!("st.shared.b32 rate, {ways} ways, {warps} warps");
            all.push(Probe { warps, ..probe(name, Kind::Rate, store) });
        }
        let store = |b: &mut Bench| shared_stores::<4>(b, 4);
        all.push(Probe { warps, ..probe(format!("st.shared.v4 rate, {warps} warps"), Kind::Rate, store) });
    }
    all
}

/// Loads whose result is the next address, as words hold their own addresses. Lanes are `stride` words apart.
fn shared_chase<const N: usize>(b: &mut Bench, stride: u32) {
    let place = b.k.shared_index(b.shared, b.lane, 4 * stride);
    let x: [R32; N] = std::array::from_fn(|_| b.k.mov(place.base));
    b.repeat(|k, _| {
        let from = Shared { base: x[0], offset: 0 };
        volatile(k, x, from);
    });
    b.keep_all(&x);
}

fn shared_loads<const N: usize>(b: &mut Bench, stride: u32) {
    let place = b.k.shared_index(b.shared, b.lane, 4 * stride);
    let sums = b.integers::<CHAINS>();
    b.repeat(|k, n| {
        let x: [R32; N] = k.regs();
        volatile(k, x, place.at(i64::from(n % 8) * 128));
        let sum = sums[n as usize % CHAINS];
        x.into_iter().for_each(|x| k.xor_to(sum, sum, x));
    });
    b.keep_all(&sums);
}

/// Each warp stores to its own 2 KB.
fn shared_stores<const N: usize>(b: &mut Bench, stride: u32) {
    let warp = b.k.shr_u(b.thread, 5);
    let own = b.k.shared_index(b.shared, warp, SHARED / MANY);
    let place = b.k.shared_index(own, b.lane, 4 * stride);
    let x: [R32; N] = b.integers();
    b.repeat(|k, n| {
        let mut memory = Memory::vector(Space::Shared, Type::B32, N as u8);
        memory.sem = MemSem::Volatile;
        let to = place.at(i64::from(n % 4) * 128);
        k.op(Op::St(memory), [Operand::Address(to.address()), operand(&x)]);
    });
    b.keep_all(&x);
}

/// A pointer chase through the data buffer, with all lanes at one address.
fn chase(name: &str, cache: Option<CacheOp>, entries: u32, stride: u32, step: u32) -> Probe {
    let code = move |b: &mut Bench| {
        let pointer: R64 = b.k.mov(b.data.base);
        b.repeat(|k, _| {
            let mut memory = Memory::plain(Space::Global, Type::B64);
            memory.cache = cache;
            let from = Global { base: pointer, offset: 0 };
            k.op(Op::Ld(memory), [Operand::Reg(pointer.reg()), Operand::Address(from.address())]);
        });
        let low = b.k.trunc(pointer);
        b.keep(low);
    };
    Probe {
        chain: Some(Chain { entries, stride, step }),
        data: (entries as usize) * stride as usize,
        ..probe(name, Kind::Latency, code)
    }
}

fn caches() -> Vec<Probe> {
    let far = chase("ld.global chain in DRAM", Some(CacheOp::Cg), (FAR >> 7) as u32, 128, 509);
    vec![
        chase("ld.global chain in L1", None, 32, 128, 1),
        chase("ld.global chain in L2", Some(CacheOp::Cg), 4096, 512, 1),
        // Within the reach of one page's address translation.
        chase("ld.global chain in L2, a thousand lines", Some(CacheOp::Cg), 1024, 128, 1),
        Probe { constant: Some(|gpu| f64::from(gpu.latency.dram)), ..far },
        probe("atom.global.add chain", Kind::Latency, |b| {
            let at = b.k.index(b.data, b.thread, 4);
            let [x] = b.integers::<1>();
            b.repeat(|k, _| {
                let old = k.atom(AtomicOp::Add, at, x);
                k.mov_to(x, old);
            });
            b.keep(x);
        }),
        probe("cp.async chain in L2", Kind::Latency, |b| {
            let to = b.k.shared_index(b.shared, b.thread, 16);
            let from = b.k.index(b.data, b.thread, 16);
            b.repeat(|k, _| {
                k.cp_async(to, from, 16, None);
                k.cp_async_commit();
                k.cp_async_wait(0);
            });
            let kept: R32 = b.k.ld(to);
            b.keep(kept);
        }),
        probe("cp.async rate in L2", Kind::Rate, |b| {
            let to = b.k.shared_index(b.shared, b.thread, 16);
            let from = b.k.index(b.data, b.thread, 16);
            b.repeat(|k, n| {
                let part = 16 * i64::from(32 * MANY) * i64::from(n % 4);
                k.cp_async(to.at(part), from.at(part), 16, None);
                if n % 4 == 3 {
                    k.cp_async_commit();
                }
            });
            b.k.cp_async_wait(0);
            let kept: R32 = b.k.ld(to);
            b.keep(kept);
        }),
        probe("ld.global.b32 rate in L1", Kind::Rate, |b| global_loads::<1>(b, 4)),
        probe("ld.global.v4 rate in L1", Kind::Rate, |b| global_loads::<4>(b, 16)),
        probe("ld.global.b32 rate in L1, 16 bytes apart", Kind::Rate, |b| global_loads::<1>(b, 16)),
        probe("ld.global.b32 rate in L1, 128 bytes apart", Kind::Rate, |b| global_loads::<1>(b, 128)),
    ]
}

/// All warps read the same few KB. For the compiler the address changes from round to round.
fn global_loads<const N: usize>(b: &mut Bench, bytes: u32) {
    let place = b.k.index(b.data, b.lane, bytes);
    let zero = b.k.shr_u(b.rounds, 31);
    let zero = b.k.zext(zero);
    let sums = b.integers::<CHAINS>();
    b.repeat(|k, n| {
        if n == 0 {
            k.advance_to(place, zero);
        }
        let x: [R32; N] = k.regs();
        let from = place.at(i64::from(n) * 512);
        let memory = Memory::vector(Space::Global, Type::B32, N as u8);
        k.op(Op::Ld(memory), [operand(&x), Operand::Address(from.address())]);
        let sum = sums[n as usize % CHAINS];
        x.into_iter().for_each(|x| k.xor_to(sum, sum, x));
    });
    b.keep_all(&sums);
}

fn tensor() -> Vec<Probe> {
    let k16 = |chains: usize| {
        move |b: &mut Bench| {
            let (a, m) = (b.integers::<4>(), b.integers::<2>());
            let c: Vec<[ptx::F32; 4]> = (0..chains).map(|_| b.floats()).collect();
            b.repeat(|k, n| k.mma_m16n8k16(Half::F16, c[n as usize % chains], a, m));
            b.keep_all_f(c.as_flattened());
        }
    };
    let k8 = |chains: usize| {
        move |b: &mut Bench| {
            let (a, [m]) = (b.integers::<2>(), b.integers());
            let c: Vec<[ptx::F32; 4]> = (0..chains).map(|_| b.floats()).collect();
            b.repeat(|k, n| k.mma_m16n8k8(Half::F16, c[n as usize % chains], a, m));
            b.keep_all_f(c.as_flattened());
        }
    };
    let mut all = vec![
        probe("mma.m16n8k16 chain", Kind::Latency, k16(1)),
        probe("mma.m16n8k8 chain", Kind::Latency, k8(1)),
        probe("mma.m16n8k16 rate", Kind::Rate, k16(4)),
        probe("mma.m16n8k8 rate", Kind::Rate, k8(4)),
    ];
    for warps in [4, 8] {
        let name = format!("mma.m16n8k16 rate, {warps} warps");
        all.push(Probe { warps, ..probe(name, Kind::Rate, k16(8)) });
    }
    all.extend([
        probe("ldmatrix.x1 chain", Kind::Latency, matrix_chase::<1>),
        probe("ldmatrix.x4 chain", Kind::Latency, matrix_chase::<4>),
        probe("ldmatrix.x1 rate", Kind::Rate, matrix_loads::<1>),
        probe("ldmatrix.x2 rate", Kind::Rate, matrix_loads::<2>),
        probe("ldmatrix.x4 rate", Kind::Rate, matrix_loads::<4>),
        Probe { warps: 4, ..probe("ldmatrix.x4 rate, 4 warps", Kind::Rate, matrix_loads::<4>) },
    ]);
    all
}

/// Reads rows of 16 bytes in order, without conflicts. The address depends on the loaded values.
fn matrix_chase<const N: usize>(b: &mut Bench) {
    let row = b.k.shared_index(b.shared, b.lane, 16);
    let (address, zero): (R32, R32) = (b.k.mov(row.base), b.k.shr_u(b.rounds, 31));
    b.repeat(|k, _| {
        let x: [R32; N] = k.ldmatrix(Shared { base: address, offset: 0 });
        k.mad_to(address, x[0], zero, row.base);
    });
    b.keep(address);
}

/// `ldmatrix` loads. For the compiler the address changes from round to round.
fn matrix_loads<const N: usize>(b: &mut Bench) {
    let row = b.k.shared_index(b.shared, b.lane, 16);
    let address: R32 = b.k.mov(row.base);
    let zero = b.k.shr_u(b.rounds, 31);
    let sums = b.integers::<CHAINS>();
    b.repeat(|k, n| {
        if n == 0 {
            k.add_to(address, address, zero);
        }
        let x: [R32; N] = k.ldmatrix(Shared { base: address, offset: 512 * i64::from(n) });
        let sum = sums[n as usize % CHAINS];
        x.into_iter().for_each(|x| k.xor_to(sum, sum, x));
    });
    b.keep_all(&sums);
}

fn barriers() -> Vec<Probe> {
    let mut all = Vec::new();
    for warps in [1, 2, 4, 8, 16, 32] {
        let code = |b: &mut Bench| {
            b.repeat(|k, _| k.bar_sync());
            let [x] = b.integers::<1>();
            b.keep(x);
        };
        all.push(Probe { warps, ..probe(format!("bar.sync, {warps} warps"), Kind::Latency, code) });
    }
    all.push(probe("bar.warp.sync", Kind::Latency, |b| {
        b.repeat(|k, _| k.warp_sync());
        let [x] = b.integers::<1>();
        b.keep(x);
    }));
    all
}

/// Loops of one thread over a row: the loop bodies that dominate the original kernels.
fn loops() -> Vec<Probe> {
    let row_max = |b: &mut Bench| {
        let at = b.k.shared_advance(b.shared, 0);
        let [m] = b.floats();
        b.repeat(|k, _| {
            let x: ptx::F32 = k.ld(at);
            k.max_to(m, m, x);
            k.add_to(at.base, at.base, 4);
        });
        b.keep_f(m);
    };
    let row_sum = |b: &mut Bench| {
        let at = b.k.shared_advance(b.shared, 0);
        let ([sum], one) = (b.floats(), b.one);
        b.repeat(|k, _| {
            let x: ptx::F32 = k.ld(at);
            let x = k.sub(x, one);
            let x = k.mul(x, std::f32::consts::LOG2_E);
            let e = k.ex2(x);
            k.st(at, e);
            k.add_to(sum, sum, e);
            k.add_to(at.base, at.base, 4);
        });
        b.keep_f(sum);
    };
    let dot = |b: &mut Bench| {
        let at = b.k.shared_advance(b.shared, 0);
        let from = b.k.advance(b.data, 0);
        let [sum] = b.floats();
        b.repeat(|k, _| {
            let (x, y): (R16, R16) = (k.ld(at), k.ld(from));
            let (x, y) = (k.to_f32(Half::F16, x), k.to_f32(Half::F16, y));
            k.mad_to(sum, x, y, sum);
            k.add_to(at.base, at.base, 2);
            k.advance_to(from, 2);
        });
        b.keep_f(sum);
    };
    let update = |b: &mut Bench| {
        let at = b.k.shared_index(b.shared, b.thread, 4);
        let from = b.k.index(b.data, b.thread, 2);
        let one = b.one;
        b.repeat(|k, _| {
            let (sum, y): (ptx::F32, R16) = (k.ld(at), k.ld(from));
            let y = k.to_f32(Half::F16, y);
            let next = k.mad(y, one, sum);
            k.st(at, next);
            k.advance_to(from, 128);
        });
        let [x] = b.integers::<1>();
        b.keep(x);
    };
    let shuffles = |differ: bool| {
        move |b: &mut Bench| {
            if differ {
                b.rounds_differ();
            }
            let [sum] = b.floats();
            b.repeat(|k, _| {
                for lanes in [16, 8, 4, 2, 1] {
                    let other = k.shfl_down(sum, lanes);
                    k.add_to(sum, sum, other);
                }
            });
            b.keep_f(sum);
        }
    };
    let block = |b: &mut Bench| {
        b.rounds_differ();
        let (at, lane, rounds) = (b.k.shared_index(b.shared, b.thread, 4), b.lane, b.rounds);
        let [sum] = b.floats();
        b.repeat(|k, _| {
            let inside = k.setp_u(CmpOp::Lt, lane, rounds);
            k.if_(inside, |k| {
                let x: ptx::F32 = k.ld(at);
                let x = k.mad(x, x, sum);
                k.st(at, x);
                let inside = k.setp_u(CmpOp::Ne, lane, rounds);
                k.if_(inside, |k| {
                    let x: ptx::F32 = k.ld(at.at(1024));
                    let x = k.mad(x, x, sum);
                    k.st(at.at(1024), x);
                });
            });
        });
        b.keep_f(sum);
    };
    vec![
        probe("loop: sum by shuffles", Kind::Loop, shuffles(false)),
        probe("loop: sum by shuffles, rounds unknown", Kind::Loop, shuffles(true)),
        probe("loop: blocks that lanes may skip", Kind::Loop, block),
        probe("loop: row maximum in shared memory", Kind::Loop, row_max),
        probe("loop: row of exponentials in shared memory", Kind::Loop, row_sum),
        probe("loop: dot product of halves, shared and L1", Kind::Loop, dot),
        probe("loop: f32 sum in shared memory, halves from global", Kind::Loop, update),
    ]
}

/// Streams through the data buffer, 16 bytes per lane, bypassing L1.
fn bandwidth() -> Vec<Probe> {
    let stream = |name: &str, bytes: u32, everywhere: bool, constant: fn(&Gpu) -> f64| Probe {
        everywhere,
        units: 4,
        data: bytes as usize,
        constant: Some(constant),
        ..probe(name, Kind::Rate, move |b| ring(b, bytes))
    };
    vec![
        stream("512 bytes from L2, every SM", 8 << 20, true, |gpu| 512.0 / gpu.l2_bytes_per_clock(gpu.sms)),
        stream("512 bytes from L2, one SM", 8 << 20, false, |gpu| 512.0 / gpu.l2_bytes_per_clock(1)),
        stream("512 bytes from DRAM, every SM", 512 << 20, true, |gpu| {
            512.0 * f64::from(gpu.sms) / gpu.dram_bytes_per_clock()
        }),
    ]
}

/// The whole grid reads consecutive pieces of a buffer of `bytes`, a power of two, again and again.
fn ring(b: &mut Bench, bytes: u32) {
    let ctas = b.k.special(SpecialReg::NctaidX);
    let step = b.k.mul(ctas, 512 * MANY);
    let thread = b.k.mad(b.cta, 32 * MANY, b.thread);
    let offset = b.k.mul(thread, 16);
    let (data, sums) = (b.data, b.integers::<CHAINS>());
    b.repeat(|k, n| {
        let from = k.zext(offset);
        let from = k.advance(data, from);
        let x = k.ld_stream16(from);
        let sum = sums[n as usize % CHAINS];
        x.into_iter().for_each(|x| k.xor_to(sum, sum, x));
        k.add_to(offset, offset, step);
        k.and_to(offset, offset, bytes - 1);
    });
    b.keep_all(&sums);
}
