//! The signatures of `candle-flash-attn` and `candle-flash-attn-v3` 0.11.
#![expect(clippy::type_complexity, reason = "the signatures are the subject")]

use candle::{Result, Tensor};
use candle_flashcore as flash;

type T<'a> = &'a Tensor;
type Size = Option<usize>;

#[test]
fn functions_have_the_signatures_of_candles() {
    let _: fn(T, T, T, f32, bool) -> Result<Tensor> = flash::flash_attn;
    let _: fn(T, T, T, f32, Size, Size) -> Result<Tensor> = flash::flash_attn_windowed;
    let _: fn(T, T, T, T, f32, bool) -> Result<Tensor> = flash::flash_attn_alibi;
    let _: fn(T, T, T, T, f32, Size, Size) -> Result<Tensor> = flash::flash_attn_alibi_windowed;
    let _: fn(T, T, T, Option<T>, f32, Size, Size, f32) -> Result<Tensor> =
        flash::flash_attn_alibi_windowed_softcap;
    let _: fn(T, T, T, T, T, usize, usize, f32, bool) -> Result<Tensor> = flash::flash_attn_varlen;
    let _: fn(T, T, T, T, T, usize, usize, f32, Size, Size) -> Result<Tensor> =
        flash::flash_attn_varlen_windowed;
    let _: fn(
        T,
        T,
        T,
        T,
        T,
        T,
        Option<T>,
        usize,
        usize,
        f32,
        Size,
        Size,
        usize,
        Option<f32>,
    ) -> Result<Tensor> = flash::flash_attn_varlen_paged_windowed;
    let _: fn(T, T, T, T, T, T, usize, usize, f32, bool) -> Result<Tensor> = flash::flash_attn_varlen_alibi;
    let _: fn(T, T, T, T, T, T, usize, usize, f32, Size, Size) -> Result<Tensor> =
        flash::flash_attn_varlen_alibi_windowed;
    let _: fn(T, T, T, Option<T>, T, T, usize, usize, f32, Size, Size, f32) -> Result<Tensor> =
        flash::flash_attn_varlen_alibi_windowed_softcap;

    let _: fn(T, T, T, f32, bool, bool) -> Result<Tensor> = flash::v3::flash_attn;
    let _: fn(T, T, T, f32, Size, Size, bool) -> Result<Tensor> = flash::v3::flash_attn_windowed;
    let _: fn(T, T, T, T, f32, bool, bool) -> Result<Tensor> = flash::v3::flash_attn_alibi;
    let _: fn(T, T, T, T, f32, Size, Size, bool) -> Result<Tensor> = flash::v3::flash_attn_alibi_windowed;
    let _: fn(T, T, T, T, T, usize, usize, f32, bool, bool) -> Result<Tensor> = flash::v3::flash_attn_varlen;
    let _: fn(T, T, T, T, T, usize, usize, f32, Size, Size, bool) -> Result<Tensor> =
        flash::v3::flash_attn_varlen_windowed;
    let _: fn(T, T, T, T, T, T, usize, usize, f32, bool, bool) -> Result<Tensor> =
        flash::v3::flash_attn_varlen_alibi;
    let _: fn(T, T, T, T, T, T, usize, usize, f32, Size, Size, bool) -> Result<Tensor> =
        flash::v3::flash_attn_varlen_alibi_windowed;
}
