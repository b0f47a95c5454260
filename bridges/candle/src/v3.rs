//! The functions of `candle-flash-attn-v3`. They are those of this crate's root: `use_gqa_packing` is a hint
//! on speed, and FlashCore decides by itself whether the heads of a group share a tile.

use candle::{Result, Tensor};

macro_rules! forward {
    ($($name:ident($($argument:ident: $type:ty),* $(,)?);)*) => {$(
        #[doc = concat!("[`", stringify!($name), "`](crate::", stringify!($name), ").")]
        ///
        /// # Errors
        /// As that function.
        #[allow(clippy::too_many_arguments, reason = "the signature of candle-flash-attn-v3")]
        pub fn $name($($argument: $type),*, use_gqa_packing: bool) -> Result<Tensor> {
            let _ = use_gqa_packing;
            crate::$name($($argument),*)
        }
    )*};
}

forward! {
    flash_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool);
    flash_attn_windowed(
        q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, window_size_left: Option<usize>,
        window_size_right: Option<usize>,
    );
    flash_attn_alibi(
        q: &Tensor, k: &Tensor, v: &Tensor, alibi_slopes: &Tensor, softmax_scale: f32, causal: bool,
    );
    flash_attn_alibi_windowed(
        q: &Tensor, k: &Tensor, v: &Tensor, alibi_slopes: &Tensor, softmax_scale: f32,
        window_size_left: Option<usize>, window_size_right: Option<usize>,
    );
    flash_attn_varlen(
        q: &Tensor, k: &Tensor, v: &Tensor, seqlens_q: &Tensor, seqlens_k: &Tensor, max_seqlen_q: usize,
        max_seqlen_k: usize, softmax_scale: f32, causal: bool,
    );
    flash_attn_varlen_windowed(
        q: &Tensor, k: &Tensor, v: &Tensor, seqlens_q: &Tensor, seqlens_k: &Tensor, max_seqlen_q: usize,
        max_seqlen_k: usize, softmax_scale: f32, window_size_left: Option<usize>,
        window_size_right: Option<usize>,
    );
    flash_attn_varlen_alibi(
        q: &Tensor, k: &Tensor, v: &Tensor, alibi_slopes: &Tensor, seqlens_q: &Tensor, seqlens_k: &Tensor,
        max_seqlen_q: usize, max_seqlen_k: usize, softmax_scale: f32, causal: bool,
    );
    flash_attn_varlen_alibi_windowed(
        q: &Tensor, k: &Tensor, v: &Tensor, alibi_slopes: &Tensor, seqlens_q: &Tensor, seqlens_k: &Tensor,
        max_seqlen_q: usize, max_seqlen_k: usize, softmax_scale: f32, window_size_left: Option<usize>,
        window_size_right: Option<usize>,
    );
}
