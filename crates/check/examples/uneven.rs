//! Predicts times of small grids in each family, with even and with uneven lengths. The difference is the
//! cost of a packed batch, because the families for small grids support only even lengths. `cargo run
//! --example uneven -p flashcore-check`.

use check::forecast;
use flashcore_check as check;
use kernels::forward::small;
use kernels::{Arch, Family, Plan};
use predict::machine::H200;
use problem::{DType, Layout, Lengths, Problem, SideLengths};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let arch = Arch::SM_90;
    println!(
        "| problem | small, even | wgmma, even | wgmma, packed | mma, even |\n|---|---:|---:|---:|---:|"
    );
    for dim in [64, 128] {
        for (batch, heads, seq) in [(1, 8, 512), (4, 8, 256), (4, 16, 512), (8, 8, 256)] {
            let even = Problem::new(batch, heads, seq, dim, DType::Bf16).with_layout(Layout::Bshd);
            let side = SideLengths { packed: Some(batch * seq), used: false };
            let lengths = Lengths { q: side, kv: side, left_padded: false };
            let packed = Problem { lengths, ..even.clone() }.with_layout(Layout::Bshd);
            let time = |plan: Plan, problem: &Problem| -> Result<String, Box<dyn std::error::Error>> {
                let prediction = forecast::of_plan(&plan, problem, &H200, &arch, None)?;
                Ok(format!("{:.1}", prediction.us))
            };
            let small = time(small::default_for(&even, &arch), &even);
            let [wgmma, mma] =
                [Family::Wgmma, Family::Mma].map(|family| time(family.default_for(&even, &arch)?, &even));
            let packed = time(Family::Wgmma.default_for(&packed, &arch)?, &packed);
            let name = format!("B{batch} H{heads} S{seq} D{dim}");
            println!("| {name} | {} | {} | {} | {} |", small?, wgmma?, packed?, mma?);
        }
    }
    Ok(())
}
