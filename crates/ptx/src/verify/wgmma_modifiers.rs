//! Which shapes and types `wgmma` has (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions: Matrix Shape").

use crate::{MmaShape, Type, Wgmma};

use super::modifiers::ensure;

/// Inputs with their K and their sums.
struct Family {
    inputs: &'static [Type],
    k: u16,
    sums: &'static [Type],
}

const FAMILIES: [Family; 6] = [
    Family { inputs: &[Type::F16], k: 16, sums: &[Type::F16, Type::F32] },
    Family { inputs: &[Type::Bf16], k: 16, sums: &[Type::F32] },
    Family { inputs: &[Type::Tf32], k: 8, sums: &[Type::F32] },
    Family { inputs: &[Type::E4m3, Type::E5m2], k: 32, sums: &[Type::F16, Type::F32] },
    Family { inputs: &[Type::U8, Type::S8], k: 32, sums: &[Type::S32] },
    Family { inputs: &[Type::B1], k: 256, sums: &[Type::S32] },
];

pub(super) fn check(wgmma: &Wgmma) -> Result<(), String> {
    let Wgmma { shape: MmaShape { m, n, k }, d, a, b, .. } = *wgmma;
    let family = FAMILIES.iter().find(|f| f.inputs.contains(&a));
    let family = family.ok_or_else(|| format!("wgmma has no inputs of .{a}"))?;
    ensure(family.inputs.contains(&b), || format!("wgmma does not multiply .{a} by .{b}"))?;
    ensure(family.sums.contains(&d), || format!("wgmma of .{a} does not add to .{d}"))?;
    ensure(m == Wgmma::ROWS && k == family.k, || {
        format!("wgmma of .{a} has no shape .{}; it is .m64nNk{}", wgmma.shape, family.k)
    })?;
    let integer = d == Type::S32;
    // Integers have no odd multiples of 8 above 24.
    let columns = (8..=256).contains(&n) && n % if integer && n > 24 { 16 } else { 8 } == 0;
    ensure(columns, || {
        let accepted =
            if integer { "8, 16, 24, or 32 to 256 in steps of 16" } else { "8 to 256 in steps of 8" };
        format!("wgmma of .{a}: n = {n}; accepted: {accepted}")
    })?;
    ensure(!wgmma.satfinite || integer && a != Type::B1, || ".satfinite is for integer wgmma".into())
}
