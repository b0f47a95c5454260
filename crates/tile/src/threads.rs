use ptx::{Builder, R32, SpecialReg};

/// Where a thread stands in its CTA, read once at the start of a kernel. One-dimensional CTAs.
#[derive(Clone, Copy, Debug)]
pub struct Threads {
    /// Threads of the CTA.
    pub count: u32,
    /// Index in the CTA.
    pub index: R32,
    /// Lane in the warp.
    pub lane: R32,
    /// Warp in the CTA.
    pub warp: R32,
    /// `lane / 4`: the row of an accumulator's 8-row half that the lane holds.
    pub quad: R32,
    /// `2 · (lane mod 4)`: the first of the two columns of an 8-column tile that the lane holds.
    pub column: R32,
}

impl Threads {
    /// Reads the thread's place in a CTA of `count` threads.
    pub fn new(k: &mut Builder, count: u32) -> Threads {
        let index = k.special(SpecialReg::TidX);
        let lane = k.and(index, 31);
        let warp = k.shr_u(index, 5);
        let quad = k.shr_u(lane, 2);
        let in_quad = k.and(lane, 3);
        let column = k.shl(in_quad, 1);
        Threads { count, index, lane, warp, quad, column }
    }

    /// Warps of the CTA.
    pub const fn warps(&self) -> u32 {
        self.count / 32
    }
}
