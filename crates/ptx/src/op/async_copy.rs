use crate::CacheOp;

/// `cp.async`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct CpAsync {
    /// `.ca` (4, 8, 16 bytes) or `.cg` (16 bytes, past L1).
    pub cache: CacheOp,
    /// `.L2::64B`, `.L2::128B`, `.L2::256B`.
    pub l2_prefetch: Option<u16>,
    /// `.L2::cache_hint`.
    pub cache_hint: bool,
    /// The optional operand is a predicate: zeros are written where it is true.
    pub ignore_src: bool,
    /// `.shared::cta` is written out.
    pub shared_cta: bool,
}
