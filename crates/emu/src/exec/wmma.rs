//! Executes `wmma`: loads, stores and products of whole matrices.

use ptx::{Space, Type, Wmma};

use super::Env;
use super::access::{Site, addresses, same_space};
use super::registers::for_lanes;
use super::warp::Warp;
use crate::decode::Inst;
use crate::memory::Chunk;
use crate::numerics::tensor::wmma::{FragmentAccess, wmma, wmma_f64};
use crate::numerics::{Lanes32, Lanes64};
use crate::order::Strength;
use crate::report::HazardKind;
use crate::semantics::{Fragment, products};
use crate::trace::AccessPart;

/// Elements of a matrix, by line and by position in the line.
struct Tile([u64; 32 * Tile::LENGTH]);

impl Tile {
    /// The longest line of any shape.
    const LENGTH: usize = 16;

    fn new() -> Tile {
        Tile([0; 32 * Tile::LENGTH])
    }

    fn at(&mut self, (line, place): (usize, usize)) -> &mut u64 {
        &mut self.0[line * Tile::LENGTH + place]
    }
}

/// Line and position of the `i`-th element that a lane accesses, given those of the first.
fn neighbour(fragment: &Fragment, (line, place): (usize, usize), i: usize) -> (usize, usize) {
    if fragment.along { (line, place + i) } else { (line + i, place) }
}

/// Element `i` of a chunk whose elements have `bits` bits.
fn element(chunk: &Chunk, bits: usize, i: usize) -> u64 {
    let word = i * bits / 32;
    match bits {
        64 => u64::from(chunk[word]) | u64::from(chunk[word + 1]) << 32,
        _ => u64::from(chunk[word] >> (i * bits % 32)) & low(bits),
    }
}

fn put_element(chunk: &mut Chunk, bits: usize, i: usize, value: u64) {
    let word = i * bits / 32;
    chunk[word] |= (value as u32) << (i * bits % 32);
    if bits == 64 {
        chunk[word + 1] = (value >> 32) as u32;
    }
}

const fn low(bits: usize) -> u64 {
    u64::MAX >> (64 - bits)
}

/// The accesses of one machine instruction to one space.
struct Part<'f> {
    access: &'f FragmentAccess,
    space: Space,
    lanes: u32,
    addresses: [u64; 32],
    bytes: u32,
}

impl Env<'_> {
    /// The accesses of an instruction. They are counted and recorded.
    fn fragment_parts<'f>(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        fragment: &'f Fragment,
        mask: u32,
    ) -> Vec<Part<'f>> {
        let bases = addresses(&warp.registers, inst);
        let strides = *warp.registers.get32(inst.s[0]);
        self.check_place(warp, inst, fragment, mask, &bases, &strides);
        let mut parts = Vec::with_capacity(fragment.accesses.len());
        for access in &fragment.accesses {
            let offset = |lane: usize| fragment.offset(access.at[lane], strides[lane].into());
            let mut places = std::array::from_fn(|lane| bases[lane].wrapping_add(offset(lane)));
            let mut left = access.lanes & mask;
            while left != 0 {
                let (space, lanes) = same_space(inst.space, left, &mut places);
                left &= !lanes;
                parts.push(Part { access, space, lanes, addresses: places, bytes: fragment.bytes(access) });
            }
        }
        for part in &parts {
            match part.space {
                Space::Shared => self.log.count_shared(inst, part.lanes, &part.addresses, part.bytes),
                Space::Global => self.log.counter(inst).global(part.lanes, &part.addresses, part.bytes),
                _ => {}
            }
        }
        if let Some(recorder) = &mut self.log.recorder {
            let shared = parts.first().is_some_and(|part| part.space == Space::Shared);
            let parts =
                parts.iter().map(|p| AccessPart { lanes: p.lanes, addresses: &p.addresses, bytes: p.bytes });
            match shared {
                true => recorder.shared_parts(warp.index, inst.number, mask, parts),
                false => recorder.global_parts(warp.index, inst.number, mask, parts),
            }
        }
        parts
    }

    /// Checks rules of PTX that the machine instructions do not enforce: every lane must give the same,
    /// aligned address.
    fn check_place(
        &mut self,
        warp: &Warp,
        inst: &Inst,
        fragment: &Fragment,
        mask: u32,
        bases: &[u64; 32],
        strides: &Lanes32,
    ) {
        let lane = mask.trailing_zeros() as usize;
        let (base, stride) = (bases[lane], u64::from(strides[lane]) * u64::from(fragment.access.ty.bytes()));
        let differs =
            |l: &usize| mask >> l & 1 == 1 && (bases[*l], strides[*l]) != (bases[lane], strides[lane]);
        if let Some(other) = (0..32).find(differs) {
            self.report(HazardKind::BarrierDivergence, inst, warp.index, other, None, || {
                format!(
                    "the address or stride differs from that of lane {lane}: all lanes must give the same matrix"
                )
            });
        }
        let wanted = u64::from(fragment.access.address_alignment());
        if base % wanted != 0 {
            // The machine instructions of a matrix need 16 bytes at most.
            let shared = same_space(inst.space, 1 << lane, &mut bases.clone()).0 == Space::Shared;
            let kind = match (shared, base % 16) {
                (true, 0) => HazardKind::UnpromisedAlignment,
                _ => HazardKind::Misaligned,
            };
            self.report(kind, inst, warp.index, lane, None, || {
                format!("a matrix at address {base:#x}: PTX asks for a multiple of {wanted}")
            });
        }
        let wanted = u64::from(fragment.access.stride_alignment());
        if stride % wanted != 0 {
            self.report(HazardKind::Misaligned, inst, warp.index, lane, None, || {
                format!("a stride of {stride} bytes, which is not a multiple of {wanted}")
            });
        }
    }

    pub(super) fn wmma_load(&mut self, warp: &mut Warp, inst: &Inst, mask: u32) {
        let fragment = &self.facts.context.program.fragments[inst.target as usize];
        let mut tile = Tile::new();
        for part in self.fragment_parts(warp, inst, fragment, mask) {
            let site = site(inst, &part);
            for_lanes(part.lanes, |lane| {
                let address = part.addresses[lane];
                let chunk = match part.access.for_all {
                    true => self.load_row(warp, inst, lane, address, mask),
                    false => self.load_lane(warp, &site, lane, address),
                };
                let Some(chunk) = chunk else { return };
                for i in 0..part.access.elements {
                    *tile.at(neighbour(fragment, part.access.at[lane], i)) =
                        element(&chunk, fragment.layout.bits, i);
                }
            });
        }
        let mut registers = vec![[0u64; 32]; fragment.layout.registers];
        fragment.layout.each(|register, lane, line, place, shift| {
            registers[register][lane] |= *tile.at((line, place)) << shift;
        });
        for (slot, values) in self.facts.context.program.slots(inst).iter().zip(&registers) {
            warp.registers.set_any(*slot, mask, values);
        }
    }

    pub(super) fn wmma_store(&mut self, warp: &mut Warp, inst: &Inst, mask: u32) {
        let program = self.facts.context.program;
        let fragment = &program.fragments[inst.target as usize];
        let registers: Vec<Lanes64> =
            program.slots(inst).iter().map(|s| warp.registers.get_any(*s)).collect();
        let mut tile = Tile::new();
        fragment.layout.each(|register, lane, line, place, shift| {
            *tile.at((line, place)) = registers[register][lane] >> shift & low(fragment.layout.bits);
        });
        for part in self.fragment_parts(warp, inst, fragment, mask) {
            let site = site(inst, &part);
            for_lanes(part.lanes, |lane| {
                let mut chunk: Chunk = [0; 8];
                for i in 0..part.access.elements {
                    let value = *tile.at(neighbour(fragment, part.access.at[lane], i));
                    put_element(&mut chunk, fragment.layout.bits, i, value);
                }
                self.store_lane(warp, &site, lane, part.addresses[lane], &chunk);
            });
        }
    }

    pub(super) fn wmma(&mut self, warp: &mut Warp, inst: &Inst, w: &Wmma, mask: u32) {
        let Some(kind) = products::of_wmma(w) else { return };
        let slots = self.facts.context.program.slots(inst);
        let [a, b, _, d] = w.registers();
        let (d_slots, rest) = slots.split_at(d);
        let (a_slots, rest) = rest.split_at(a);
        let (b_slots, c_slots) = rest.split_at(b);
        let rules = self.facts.context.rules;
        let done = if w.a == Type::F64 {
            let gather =
                |slots: &[_]| -> Vec<Lanes64> { slots.iter().map(|s| *warp.registers.get64(*s)).collect() };
            let (a, b, mut sums) = (gather(a_slots), gather(b_slots), gather(c_slots));
            let done = wmma_f64(kind, rules, &a, &b, &mut sums);
            d_slots.iter().zip(&sums).for_each(|(s, d)| warp.registers.set64(*s, mask, d));
            done
        } else {
            let gather =
                |slots: &[_]| -> Vec<Lanes32> { slots.iter().map(|s| *warp.registers.get32(*s)).collect() };
            let (a, b, mut sums) = (gather(a_slots), gather(b_slots), gather(c_slots));
            let mixed = w.c != w.d;
            if mixed && w.c == Type::F16 {
                sums = widened(&sums);
            }
            let done = wmma(kind, rules, &a, &b, &mut sums);
            if mixed && w.d == Type::F16 {
                sums = narrowed(&sums);
            }
            d_slots.iter().zip(&sums).for_each(|(s, d)| warp.registers.set32(*s, mask, d));
            done
        };
        if let Err(error) = done {
            self.report(HazardKind::OutOfBounds, inst, warp.index, 0, None, || error.to_string());
        }
    }
}

fn site<'i>(inst: &'i Inst, part: &Part) -> Site<'i> {
    Site { inst, space: part.space, bytes: part.bytes, strength: Strength::Weak }
}

/// Widens each register of two f16 values to two registers of f32.
fn widened(halves: &[Lanes32]) -> Vec<Lanes32> {
    let half = |word: u32, i: u32| half::f16::from_bits((word >> (16 * i)) as u16).to_f32().to_bits();
    halves.iter().flat_map(|r| [r.map(|word| half(word, 0)), r.map(|word| half(word, 1))]).collect()
}

/// Rounds each pair of f32 registers to one register of two f16 values, to nearest even.
fn narrowed(sums: &[Lanes32]) -> Vec<Lanes32> {
    let half = |bits: u32| {
        let value = f32::from_bits(bits);
        if value.is_nan() { 0x7fff } else { u32::from(half::f16::from_f32(value).to_bits()) }
    };
    let pack = |pair: &[Lanes32]| std::array::from_fn(|l| half(pair[0][l]) | half(pair[1][l]) << 16);
    sums.chunks_exact(2).map(pack).collect()
}
