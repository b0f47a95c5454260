//! The common frame of all probe kernels.

use ptx::{
    Access, Arg, BufferSpec, Builder, CmpOp, Dim3, F32, Global, Kernel, Launch, Pointer, R32, R64, Shared,
    SpecialReg, Target, Verified, Violations,
};

use super::Chain;

pub(super) const ENTRY: &str = "probe";
pub const SHARED: u32 = 32 << 10;

/// A probe's kernel under construction.
pub struct Bench {
    pub k: Builder,
    pub data: Global,
    /// Shared memory of `SHARED` bytes. Each word holds its own address.
    pub shared: Shared,
    /// The value 1.0, unknown to the compiler.
    pub one: F32,
    /// Index of the thread in its CTA.
    pub thread: R32,
    /// Index of the lane in its warp.
    pub lane: R32,
    /// Index of the CTA.
    pub cta: R32,
    /// Number of rounds, unknown to the compiler.
    pub rounds: R32,
    clocks: Global,
    kept: Global,
    units: u32,
}

impl Bench {
    pub(super) fn module(
        target: Target,
        units: u32,
        code: impl Fn(&mut Bench),
    ) -> Result<Verified, Violations> {
        let mut k = Builder::kernel(ENTRY);
        let [data, clocks, kept] = ["data", "clocks", "kept"].map(|name| k.param_pointer(name));
        let (rounds, one) = (k.param_u32("rounds"), k.param_f32("one"));
        let thread = k.special(SpecialReg::TidX);
        let lane = k.and(thread, 31);
        let cta = k.special(SpecialReg::CtaidX);
        let shared = k.shared_array("words", 16, SHARED);
        let mut bench = Bench { k, data, shared, one, thread, lane, cta, rounds, clocks, kept, units };
        bench.address_words();
        code(&mut bench);
        bench.k.into_verified(target)
    }

    /// Writes each shared-memory word's address into the word.
    fn address_words(&mut self) {
        let (shared, thread) = (self.shared, self.thread);
        let threads = self.k.special(SpecialReg::NtidX);
        self.k.for_range(thread, SHARED / 4, threads, |k, i| {
            let to = k.shared_index(shared, i, 4);
            k.st(to, to.base);
        });
        self.k.bar_sync();
    }

    /// The timed loop. Each round emits `unit` `units` times, with the copy's number as an argument.
    pub fn repeat(&mut self, mut unit: impl FnMut(&mut Builder, u32)) {
        let (units, rounds, k) = (self.units, self.rounds, &mut self.k);
        k.bar_sync();
        let start = k.special64(SpecialReg::Clock64);
        let i: R32 = k.mov(0);
        k.do_while(|k| {
            k.nounroll();
            (0..units).for_each(|n| unit(k, n));
            k.add_to(i, i, 1);
            k.setp_u(CmpOp::Lt, i, rounds)
        });
        let end = k.special64(SpecialReg::Clock64);
        let warp = k.shr_u(self.thread, 5);
        let warps = k.special(SpecialReg::NtidX);
        let warps = k.shr_u(warps, 5);
        let place = k.mad(self.cta, warps, warp);
        let to = k.index(self.clocks, place, 16);
        let first = k.setp_u(CmpOp::Eq, self.lane, 0);
        k.guarded(first, |k| {
            k.st(to, start);
            k.st(to.at(8), end);
        });
    }

    /// From here on the compiler must assume that the number of rounds differs from thread to thread.
    pub fn rounds_differ(&mut self) {
        let at = self.k.index(self.data, self.thread, 4);
        let more: R32 = self.k.ld(at);
        self.rounds = self.k.add(self.rounds, more);
    }

    /// Stores a result, so that the compiler keeps its computation.
    pub fn keep(&mut self, value: R32) {
        let threads = self.k.special(SpecialReg::NtidX);
        let i = self.k.mad(self.cta, threads, self.thread);
        let to = self.k.index(self.kept, i, 4);
        self.k.st(to, value);
    }

    /// Stores an f32 result, so that the compiler keeps its computation.
    pub fn keep_f(&mut self, value: F32) {
        let bits = self.k.to_bits(value);
        self.keep(bits);
    }

    /// `N` f32 values that the compiler must assume to be different.
    pub fn floats<const N: usize>(&mut self) -> [F32; N] {
        let lane = self.k.u32_to_f32(self.lane);
        std::array::from_fn(|i| self.k.mad(lane, 0.0f32, 1.0f32 + i as f32))
    }

    /// `N` integers that differ from thread to thread.
    pub fn integers<const N: usize>(&mut self) -> [R32; N] {
        std::array::from_fn(|i| self.k.add(self.thread, i as u32 + 1))
    }

    /// Stores a combination of several results.
    pub fn keep_all(&mut self, values: &[R32]) {
        let sum = values.iter().copied().reduce(|a, b| self.k.xor(a, b));
        if let Some(sum) = sum {
            self.keep(sum);
        }
    }

    /// Stores a combination of several f32 results.
    pub fn keep_all_f(&mut self, values: &[F32]) {
        let bits: Vec<R32> = values.iter().map(|v| self.k.to_bits(*v)).collect();
        self.keep_all(&bits);
    }
}

/// The kernel that writes a chain of pointers into the data buffer.
pub(super) fn fill(target: Target, chain: Chain, bytes: usize) -> Result<Kernel, Violations> {
    const THREADS: u32 = 256;
    let mut k = Builder::kernel("fill");
    let data = k.param_pointer("data");
    let (cta, thread) = (k.special(SpecialReg::CtaidX), k.special(SpecialReg::TidX));
    let i = k.mad(cta, THREADS, thread);
    let inside = k.setp_u(CmpOp::Lt, i, chain.entries);
    k.if_(inside, |k| {
        let next = k.add(i, chain.step);
        let next = k.rem_u(next, chain.entries);
        let to = k.index(data, i, chain.stride);
        let target: R64 = k.index(data, next, chain.stride).base;
        k.st(to, target);
    });
    Ok(Kernel {
        module: k.into_verified(target)?,
        entry: "fill".to_owned(),
        launch: Launch::new(Dim3(chain.entries.div_ceil(THREADS), 1, 1), Dim3(THREADS, 1, 1)),
        buffers: vec![BufferSpec { name: "data".to_owned(), bytes, access: Access::ReadWrite }],
        tensor_maps: Vec::new(),
        args: vec![Arg::Buffer { index: 0, offset: 0 }],
    })
}
