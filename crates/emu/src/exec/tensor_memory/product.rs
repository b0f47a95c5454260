//! `tcgen05.mma` (PTX ISA, "Data Path Layout Organization" for the layouts of D).

use std::ops::Range;

use ptx::{CtaGroup, TensorProduct};

use super::super::Env;
use super::super::registers::for_lanes;
use super::super::units::LANES;
use super::super::warp::Warp;
use super::access::{Area, Issue};
use super::operands::{Row, prepare};
use crate::EmuError;
use crate::decode::Inst;
use crate::numerics::Lanes32;
use crate::numerics::tensor::{self, Accumulator, Input, MmaKind};
use crate::report::{Fidelity, HazardKind};
use crate::semantics::tensor_descriptor::Decoded;

/// Rows of a block, which lie in neighbouring lanes, and columns of a block.
pub(super) const ROWS: usize = 16;
const COLUMNS: usize = 8;

/// Rows and columns of D in the lanes of one part of tensor memory.
pub(super) struct ProductPart {
    /// The first lane of each block of 16 rows.
    pub lanes: Vec<usize>,
    /// The columns of B. The first is in the first column of D.
    pub n: Range<usize>,
}

/// The operands of one product as a lane states them.
struct Operands {
    descriptors: [u64; 2],
    /// Lane and column of A, if A is in tensor memory.
    a: (usize, usize),
    d: (usize, usize),
    adds: bool,
    /// The power of two by which D is divided first.
    divides: u32,
    /// A bit for each lane that keeps its D.
    masked: Vec<u32>,
}

/// The parts of D in the tensor memory of a CTA that has `rows` rows: Layouts A to G of the PTX ISA.
/// `lane` is the lane of D's address.
fn parts(product: &TensorProduct, rows: usize, n: usize, lane: usize) -> Vec<ProductPart> {
    let split = |count: usize| {
        let height = LANES / count;
        let part = |i: usize| ProductPart {
            lanes: (0..rows / ROWS).map(|block| height * i + ROWS * block).collect(),
            n: n / count * i..n / count * (i + 1),
        };
        (0..count).map(part).collect()
    };
    match (rows, product.stationary, product.group) {
        (64, false, CtaGroup::One) => {
            vec![ProductPart { lanes: (0..4).map(|block| 32 * block + lane).collect(), n: 0..n }]
        }
        (64, ..) => split(2),
        (32, ..) => split(4),
        _ => split(1),
    }
}

impl Env<'_> {
    pub(super) fn tensor_products(
        &mut self,
        warp: &mut Warp,
        inst: &Inst,
        product: TensorProduct,
        mask: u32,
    ) {
        for_lanes(mask, |lane| {
            let decoded = match Decoded::new(&product, warp.registers.lane(inst.s[2], lane) as u32) {
                Ok(decoded) => decoded,
                Err(message) => {
                    self.report(HazardKind::TensorMemory, inst, warp.index, lane, None, || message);
                    return;
                }
            };
            if product.a_in_tensor_memory && decoded.is_padded() {
                let what = "`tcgen05.mma` with elements of 4 or 6 bits of A in tensor memory".to_owned();
                self.log.stopped = Some(EmuError::Unsupported { line: inst.line, what });
                return;
            }
            let issue = self.issue_of(warp, inst, lane);
            let operands = self.operands_of(warp, inst, &product, lane);
            let ranks = self.ranks_of(warp, product.group);
            let least = if product.group == CtaGroup::One && decoded.m == 64 && !product.stationary {
                16
            } else {
                LANES
            };
            if !operands.d.0.is_multiple_of(least) || ranks.len() != product.group.ctas() {
                self.report(HazardKind::TensorMemory, inst, warp.index, lane, None, || {
                    format!("D in lane {} of {} CTAs does not fit the product", operands.d.0, ranks.len())
                });
                return;
            }
            self.tensor_product(warp, &issue, (&product, &decoded), &operands, ranks);
        });
    }

    fn operands_of(&self, warp: &Warp, inst: &Inst, product: &TensorProduct, lane: usize) -> Operands {
        let descriptor =
            |slot: crate::decode::Slot| if slot.is_some() { warp.registers.lane(slot, lane) } else { 0 };
        let slots = self.facts.context.program.slots(inst);
        let masks = if product.masks_lanes { product.mask_registers() } else { 0 };
        Operands {
            descriptors: [descriptor(inst.s[0]), descriptor(inst.s[1])],
            a: self.tensor_address(warp, inst.source, lane),
            d: self.tensor_address(warp, (inst.base, inst.offset), lane),
            adds: warp.registers.get_pred(inst.s[3], inst.negated, 3) >> lane & 1 == 1,
            divides: if product.kind.has_block_scales() { 0 } else { inst.target },
            masked: slots[..masks].iter().map(|slot| warp.registers.lane(*slot, lane) as u32).collect(),
        }
    }

    fn tensor_product(
        &mut self,
        warp: &Warp,
        issue: &Issue,
        (product, decoded): (&TensorProduct, &Decoded),
        operands: &Operands,
        ranks: Range<usize>,
    ) -> Option<()> {
        let count = ranks.len();
        let bits = if decoded.is_packed(product.kind) { 8 } else { decoded.kind.a().bits() };
        let signs = |negate: bool| if negate { sign_bits(decoded, product) } else { 0 };
        let mut b = Vec::new();
        for rank in ranks.clone() {
            let source = (operands.descriptors[1], decoded.transposed[1]);
            b.extend(self.shared_rows(issue, (rank, bits), source, decoded.n / count)?);
        }
        prepare(&mut b, decoded.storage[1], signs(decoded.negate[1]));
        let rows = decoded.m / count;
        let depth = if decoded.is_packed(product.kind) { 64 } else { decoded.kind.shape().k };
        let work = 2 * (decoded.m * decoded.n * depth) as u64;
        self.log.counter(issue.inst).tensor_flop += work;
        self.log.toll += work / (2 * 16 * 8 * 16);
        for (index, rank) in ranks.enumerate() {
            let whole = if product.a_in_tensor_memory {
                None
            } else {
                let source = (operands.descriptors[0], decoded.transposed[0]);
                Some(self.shared_rows(issue, (rank, bits), source, rows)?)
            };
            let scales = match decoded.scales {
                Some(scales) => Some(self.read_scales(warp, issue, scales, (rank, rows, decoded.n))?),
                None => None,
            };
            for part in parts(product, rows, decoded.n, operands.d.0) {
                let mut a = match &whole {
                    Some(whole) => whole.clone(),
                    None => {
                        let lanes: Vec<usize> = part.lanes.iter().flat_map(|l| *l..*l + ROWS).collect();
                        self.tensor_rows(issue, rank, &lanes, operands.a.1)?
                    }
                };
                prepare(&mut a, decoded.storage[0], signs(decoded.negate[0]));
                let masked = operands.masked.get(4 * index..4 * index + 4).unwrap_or(&[]);
                let target = Target {
                    rank,
                    column: operands.d.1,
                    adds: operands.adds,
                    divides: operands.divides,
                    masked,
                };
                self.touch_target(issue, &part, &target)?;
                if self.facts.context.options.fidelity == Fidelity::Sketch {
                    continue;
                }
                match &scales {
                    Some(scales) => self.scaled_part((product, decoded), (&a, &b), &part, &target, scales),
                    None => self.product_part(issue, decoded, (&a, &b), &part, &target)?,
                }
            }
        }
        Some(())
    }

    /// Checks the accesses to the D of a part.
    fn touch_target(&mut self, issue: &Issue, part: &ProductPart, target: &Target) -> Option<()> {
        for lane in &part.lanes {
            let columns = target.column..target.column + part.n.len();
            let area = Area { rank: target.rank, lanes: *lane..lane + ROWS, columns };
            if target.adds && !self.touch_area(issue, &area, false) {
                return None;
            }
            if !self.touch_area(issue, &area, true) {
                return None;
            }
        }
        Some(())
    }

    fn product_part(
        &mut self,
        issue: &Issue,
        decoded: &Decoded,
        (a, b): (&[Row], &[Row]),
        part: &ProductPart,
        target: &Target,
    ) -> Option<()> {
        let kind = decoded.kind;
        let right: Vec<[Lanes32; 2]> = b[part.n.clone()].chunks_exact(COLUMNS).map(right_fragment).collect();
        for (rows, lane) in a.chunks_exact(ROWS).zip(&part.lanes) {
            let left = left_fragment(rows);
            for (block, right) in right.iter().enumerate() {
                let column = target.column + COLUMNS * block;
                let c = self.sums(kind, target, *lane, column);
                let mut d = [[0; 32]; 4];
                let registers = kind.registers()[2];
                let done =
                    tensor::mma(kind, decoded.rules, &left, right, &c[..registers], &mut d[..registers]);
                if let Err(error) = done {
                    self.report(HazardKind::TensorMemory, issue.inst, issue.warp, issue.lane, None, || {
                        error.to_string()
                    });
                    return None;
                }
                for (row, at) in cells().filter(|(row, _)| !target.keeps(lane + row)) {
                    let value = element(kind, &d, row, at);
                    self.tensors.set_word(target.rank, lane + row, column + at, value);
                }
            }
        }
        Some(())
    }

    /// The fragment of C of a block.
    fn sums(&self, kind: MmaKind, target: &Target, lane: usize, column: usize) -> [Lanes32; 4] {
        let mut c = [[0; 32]; 4];
        if target.adds {
            for (row, at) in cells() {
                let word = self.tensors.word(target.rank, lane + row, column + at);
                let word = divided(kind.accumulator(), word, target.divides);
                set_element(kind, &mut c, (row, at), word);
            }
        }
        c
    }
}

/// The D of a part: columns, and what is added to the product.
pub(super) struct Target<'m> {
    pub rank: usize,
    pub column: usize,
    pub adds: bool,
    divides: u32,
    masked: &'m [u32],
}

impl Target<'_> {
    /// Whether `disable-output-lane` has the lane.
    pub fn keeps(&self, lane: usize) -> bool {
        self.masked.get(lane / 32).is_some_and(|mask| mask >> (lane % 32) & 1 == 1)
    }
}

fn cells() -> impl Iterator<Item = (usize, usize)> {
    (0..ROWS).flat_map(|row| (0..COLUMNS).map(move |column| (row, column)))
}

/// The sign bits of the elements in a word.
fn sign_bits(decoded: &Decoded, product: &TensorProduct) -> u32 {
    match decoded.kind.a() {
        _ if decoded.is_packed(product.kind) => 0x8888_8888,
        Input::Tf32 => 0x8000_0000,
        Input::F16 | Input::Bf16 => 0x8000_8000,
        _ => 0x8080_8080,
    }
}

/// 16 rows of A in the layout of mma's fragments.
fn left_fragment(rows: &[Row]) -> [Lanes32; 4] {
    let mut registers = [[0; 32]; 4];
    for (row, words) in rows.iter().enumerate() {
        for (word, value) in words.iter().enumerate() {
            registers[word / 4 * 2 + row / 8][row % 8 * 4 + word % 4] = *value;
        }
    }
    registers
}

/// Eight columns of B in the layout of mma's fragments.
fn right_fragment(columns: &[Row]) -> [Lanes32; 2] {
    let mut registers = [[0; 32]; 2];
    for (column, words) in columns.iter().enumerate() {
        for (word, value) in words.iter().enumerate() {
            registers[word / 4][column * 4 + word % 4] = *value;
        }
    }
    registers
}

/// An element of D. 16-bit elements are in the lower half of a word of tensor memory.
fn element(kind: MmaKind, d: &[Lanes32; 4], row: usize, column: usize) -> u32 {
    match kind.accumulator() {
        Accumulator::F16 => d[row / 8][row % 8 * 4 + column / 2] >> (16 * (column % 2)) & 0xffff,
        _ => d[row / 8 * 2 + column % 2][row % 8 * 4 + column / 2],
    }
}

fn set_element(kind: MmaKind, c: &mut [Lanes32; 4], (row, column): (usize, usize), value: u32) {
    match kind.accumulator() {
        Accumulator::F16 => c[row / 8][row % 8 * 4 + column / 2] |= (value & 0xffff) << (16 * (column % 2)),
        _ => c[row / 8 * 2 + column % 2][row % 8 * 4 + column / 2] = value,
    }
}

/// D divided by two to the power of `scale-input-d`.
fn divided(accumulator: Accumulator, word: u32, power: u32) -> u32 {
    let factor = (-(power as f32)).exp2();
    match accumulator {
        _ if power == 0 => word,
        Accumulator::F16 => {
            let value = half::f16::from_bits(word as u16).to_f32() * factor;
            half::f16::from_f32(value).to_bits().into()
        }
        Accumulator::F32 => (f32::from_bits(word) * factor).to_bits(),
        Accumulator::F64 | Accumulator::S32 { .. } => word,
    }
}
