//! AVX-512 VBMI: steps on 8-bit elements in place.
#![allow(unsafe_code)] // a function that is compiled for the instructions

use super::Avx512;
use crate::dims::{self, InPlace};
use crate::tile::Step;

impl Avx512<true> {
    pub(crate) fn detect_bytes() -> Option<Self> {
        let bytes = is_x86_feature_detected!("avx512bw") && is_x86_feature_detected!("avx512vbmi");
        // SAFETY: the processor has the instructions.
        Avx512::detect().filter(|_| bytes).map(|s| unsafe { s.with_bytes() })
    }

    /// Runs `step` on 8-bit elements in place, with the lanes along the head dim.
    pub(super) fn step_bytes(self, step: Step<'_>, rows: InPlace<'_>) {
        #[target_feature(enable = "avx512f,avx512dq,avx512bw,avx512vbmi")]
        fn compiled(s: Avx512<true>, step: Step<'_>, rows: InPlace<'_>) {
            dims::run_bytes(s, step, rows);
        }
        // SAFETY: `self` implies the instructions.
        unsafe { compiled(self, step, rows) }
    }
}
