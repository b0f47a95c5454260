//! The kernels of a quantisation: parameters, launches and bodies.

use problem::{Problem, Quantization};
use ptx::{Access, Builder, CmpOp, Dim3, F32, Global, Launch, Pointer, Pred, R32, R64, SpecialReg};

use super::code::{Passes, QuantizationCode, THREADS, UNIT};
use super::units::{LEAST, Unit, Units, factor, largest_of_cta, raise, sign_words};
use crate::Arch;
use crate::contract::Contract;
use crate::draft::{Draft, Drafts};
use crate::forward::contract::declare_head_strides;

const ENTRY: &str = "flash_quantize";
const FIRST_ENTRY: &str = "flash_quantize_largest";
/// The name of the temporary: the largest magnitude of each part of the rows of a factor.
const LARGEST: &str = "largest_magnitudes";

/// Extents of a launch.
struct Sizes {
    batch: u32,
    heads_kv: u32,
    /// Heads that share a factor.
    group: u32,
    /// Rows of a head.
    rows: u32,
    /// Rows of a head that share a factor.
    of_factor: u32,
    /// Factors of a head.
    blocks: u32,
    /// Tiles of the rows of a head that share a factor.
    tiles: u32,
    /// CTAs that share a factor.
    parts: u32,
}

impl Sizes {
    fn new(code: &QuantizationCode, problem: &Problem, options: &Quantization) -> Sizes {
        let [batch, heads, rows, _] = problem.extents(code.tensor);
        let group = (heads / problem.heads_kv) as u32;
        let of_factor = options.rows.map_or(rows as u32, |block| (rows as u32).min(block)).max(1);
        let tiles = of_factor.div_ceil(code.tile());
        // Each thread of the second kernel reads at most one part.
        let parts = match code.passes {
            Passes::Held { .. } => 1,
            Passes::Two { .. } => (group * tiles).min(THREADS),
        };
        Sizes {
            batch: batch as u32,
            heads_kv: problem.heads_kv as u32,
            group,
            rows: rows as u32,
            of_factor,
            blocks: (rows as u32).div_ceil(of_factor).max(1),
            tiles,
            parts,
        }
    }

    const fn factors(&self) -> usize {
        self.batch as usize * self.heads_kv as usize * self.blocks as usize
    }

    const fn launch(&self, threads: u32) -> Launch {
        Launch {
            grid: Dim3(self.blocks * self.parts, self.heads_kv, self.batch),
            cluster: Dim3(1, 1, 1),
            block: Dim3(threads, 1, 1),
            dynamic_shared: 0,
            overlapping: false,
        }
    }
}

/// The kernels of a quantisation that was checked.
pub(super) fn drafts(
    code: &QuantizationCode,
    problem: &Problem,
    options: &Quantization,
    arch: &Arch,
) -> Drafts<'static> {
    let (code, sizes) = (*code, Sizes::new(code, problem, options));
    let rotation = options.rotation(problem, code.tensor);
    let signs = rotation.as_ref().map_or_else(Vec::new, sign_words);
    let draft = |entry, body: fn(&mut Builder, QuantizationCode, Params), first: bool| {
        let mut k = Builder::kernel(entry);
        k.max_threads(code.threads);
        if code.rotated {
            k.min_ctas_per_sm(code.resident_threads() / code.threads);
        }
        let mut contract = Contract::new(problem);
        let params = Params::declare(&mut k, &mut contract, (&code, &sizes), (problem, &signs), first);
        Draft::new(k, contract, (entry, sizes.launch(code.threads)), arch.target(), move |k| {
            body(k, code, params)
        })
    };
    match code.passes {
        Passes::Held { .. } => draft(ENTRY, held, false).into(),
        Passes::Two { .. } => {
            Drafts::from(draft(FIRST_ENTRY, find_largest, true)).followed_by(draft(ENTRY, round, false))
        }
    }
}

/// The parameters of a kernel.
struct Params {
    from: Global,
    /// The codes and the factors; `None` in the first of two kernels.
    to: Option<(Global, Global)>,
    /// The largest magnitudes of parts; `None` in a single kernel.
    largest: Option<Global>,
    batch_bytes: R64,
    head_bytes: R64,
    row_bytes: R64,
    rows: R32,
    of_factor: R32,
    group: R32,
    tiles: R32,
    parts: R32,
    signs: Vec<R32>,
}

impl Params {
    fn declare(
        k: &mut Builder,
        c: &mut Contract<'_>,
        (code, sizes): (&QuantizationCode, &Sizes),
        (problem, signs): (&Problem, &[u32]),
        first: bool,
    ) -> Params {
        let tensor = code.tensor;
        let from = c.tensor(k, tensor);
        let to = (!first).then(|| (c.codes(k, tensor, Access::Write), c.factors(k, tensor, sizes.factors())));
        let is_held = matches!(code.passes, Passes::Held { .. });
        let largest = (!is_held).then(|| {
            let bytes = 4 * sizes.factors() * sizes.parts as usize;
            c.temporary(k, LARGEST, bytes, if first { Access::Write } else { Access::Read })
        });
        let [batch_bytes, head_bytes] = declare_head_strides(k, c, problem, tensor);
        let row_bytes = problem.strides(tensor).row.wrapping_mul(code.from.bytes() as i64);
        Params {
            from,
            to,
            largest,
            batch_bytes,
            head_bytes,
            row_bytes: c.i64(k, "row_bytes", row_bytes),
            rows: c.u32(k, "rows", sizes.rows),
            of_factor: c.u32(k, "rows_of_factor", sizes.of_factor),
            group: c.u32(k, "group", sizes.group),
            tiles: c.u32(k, "tiles", sizes.tiles),
            parts: c.u32(k, "parts", sizes.parts),
            signs: (0..).zip(signs).map(|(i, &word)| c.u32(k, &format!("signs_{i}"), word)).collect(),
        }
    }
}

/// The rows of a CTA: those of one factor, or a part of them.
struct Place {
    code: QuantizationCode,
    params: Params,
    units: Units,
    thread: R32,
    batch: R32,
    head_kv: R32,
    /// The index of the factor.
    index: R32,
    /// The part of this CTA.
    part: R32,
    /// The first row in the head that has the factor, and the number of those rows.
    first: R32,
    left: R32,
    /// Bytes from a row to the row that the thread takes next.
    step_bytes: R64,
}

/// The shares of a thread in one tile.
struct Tile {
    /// The bits of each share, unit by unit, and whether it exists.
    shares: Vec<(Vec<Vec<R32>>, Pred)>,
    /// Where the codes of the first unit belong; `None` in the first of two kernels.
    to: Option<Global>,
}

impl Place {
    fn new(k: &mut Builder, code: QuantizationCode, params: Params) -> Place {
        let [cta, head_kv, batch, thread] =
            [SpecialReg::CtaidX, SpecialReg::CtaidY, SpecialReg::CtaidZ, SpecialReg::TidX]
                .map(|register| k.special(register));
        let units = Units::new(k, code, thread, &params.signs);
        let [ctas, heads_kv] = [SpecialReg::NctaidX, SpecialReg::NctaidY].map(|register| k.special(register));
        let (block, blocks, part) = match code.passes {
            Passes::Held { .. } => (cta, ctas, k.mov(0)),
            Passes::Two { .. } => {
                let [block, blocks] = [cta, ctas].map(|n| k.div_u(n, params.parts));
                let before = k.mul(block, params.parts);
                (block, blocks, k.sub(cta, before))
            }
        };
        let head = k.mad(batch, heads_kv, head_kv);
        let index = k.mad(head, blocks, block);
        let first = k.mul(block, params.of_factor);
        let left = k.sub(params.rows, first);
        let left = k.min_u(left, params.of_factor);
        let step_bytes = k.mul(params.row_bytes, code.slab());
        Place { code, params, units, thread, batch, head_kv, index, part, first, left, step_bytes }
    }

    /// Loads the thread's shares of the tile that begins at row `row` of those with the factor, in the head
    /// `in_group` of the group.
    fn load(&self, k: &mut Builder, (in_group, row): (R32, R32)) -> Tile {
        let Params { from, batch_bytes, head_bytes, row_bytes, rows, group, .. } = self.params;
        let head = k.mad(self.head_kv, group, in_group);
        let row = k.add(row, self.units.row);
        let in_head = k.add(self.first, row);
        let [wide_batch, wide_head, wide_row] = [self.batch, head, in_head].map(|n| k.zext(n));
        let start = k.mad(wide_batch, batch_bytes, from.base);
        let start = k.mad(wide_head, head_bytes, start);
        let start = k.mad(wide_row, row_bytes, start);
        let start = Global { base: start, offset: from.offset };
        let mut at = k.index(start, self.units.first, 4 * self.code.words() as u32);
        let mut shares = Vec::new();
        let count = self.code.shares();
        for number in 0..count {
            let row = k.add(row, number * self.code.slab());
            let exists = self.units.exists(k, row, self.left);
            shares.push((self.units.load(k, at, exists), exists));
            if number + 1 < count {
                at = k.advance(at, self.step_bytes);
            }
        }
        let to = self.params.to.map(|(codes, _)| {
            let heads_kv = k.special(SpecialReg::NctaidY);
            let heads = k.mul(heads_kv, group);
            let head = k.mad(self.batch, heads, head);
            let before = k.mul_wide_u(head, rows);
            let row = k.add(before, wide_row);
            let base = k.mad(row, self.code.dim, codes.base);
            k.index(Global { base, offset: codes.offset }, self.units.first, UNIT)
        });
        Tile { shares, to }
    }

    /// Stores the codes of share `number` of a tile.
    fn store(&self, k: &mut Builder, (tile, number): (&Tile, usize), units: &[Unit], multiplier: F32) {
        let Some(to) = tile.to else { return };
        let to = to.at(number as i64 * i64::from(self.code.slab() * self.code.dim));
        self.units.store(k, (to, tile.shares[number].1), units, multiplier);
    }

    /// Runs `body` for each tile of the CTA's part.
    fn for_tiles(&self, k: &mut Builder, body: impl FnOnce(&mut Builder, Tile)) {
        let Params { group, tiles, parts, .. } = self.params;
        let Passes::Two { grouped } = self.code.passes else { return };
        let all = if grouped { k.mul(group, tiles) } else { tiles };
        k.for_range(self.part, all, parts, |k, tile| {
            k.nounroll();
            let (in_group, tile) = if grouped {
                let in_group = k.div_u(tile, tiles);
                let before = k.mul(in_group, tiles);
                (in_group, k.sub(tile, before))
            } else {
                (k.mov(0), tile)
            };
            let row = k.mul(tile, self.code.tile());
            let loaded = self.load(k, (in_group, row));
            body(k, loaded);
        });
    }

    /// Stores the factor, by one thread of those that share it. Returns the multiplier of elements.
    fn store_factor(&self, k: &mut Builder, largest: R32) -> F32 {
        let [factor, multiplier] = factor(k, &self.code, largest);
        if let Some((_, factors)) = self.params.to {
            let to = k.index(factors, self.index, 4);
            let rank = k.or(self.thread, self.part);
            let is_first = k.setp_u(CmpOp::Eq, rank, 0);
            k.guarded(is_first, |k| k.st(to, factor));
        }
        multiplier
    }

    /// The address of the largest magnitude of part 0.
    fn largest(&self, k: &mut Builder) -> Option<Global> {
        let before = k.mul_wide_u(self.index, self.params.parts);
        let largest = self.params.largest?;
        Some(Global { base: k.mad(before, 4, largest.base), offset: largest.offset })
    }
}

/// One kernel: a CTA holds all rows of a factor.
fn held(k: &mut Builder, code: QuantizationCode, params: Params) {
    let place = Place::new(k, code, params);
    let zero: R32 = k.mov(0);
    let tile = place.load(k, (zero, zero));
    let most: R32 = k.mov(LEAST);
    let mut all = Vec::new();
    for (share, _) in &tile.shares {
        let units = place.units.elements(k, share);
        raise(k, most, &units);
        all.push(units);
    }
    let largest = largest_of_cta(k, &code, place.thread, most);
    let multiplier = place.store_factor(k, largest);
    for (number, units) in all.iter().enumerate() {
        place.store(k, (&tile, number), units, multiplier);
    }
}

/// The first of two kernels: each CTA finds the largest magnitude of its part.
fn find_largest(k: &mut Builder, code: QuantizationCode, params: Params) {
    let place = Place::new(k, code, params);
    let most: R32 = k.mov(LEAST);
    place.for_tiles(k, |k, tile| {
        for (share, _) in &tile.shares {
            let units = place.units.elements(k, share);
            raise(k, most, &units);
        }
    });
    let largest = largest_of_cta(k, &code, place.thread, most);
    if let Some(to) = place.largest(k) {
        let to = k.index(to, place.part, 4);
        let is_first = k.setp_u(CmpOp::Eq, place.thread, 0);
        k.guarded(is_first, |k| k.st(to, largest));
    }
}

/// The second of two kernels: each CTA rounds its part.
fn round(k: &mut Builder, code: QuantizationCode, params: Params) {
    let place = Place::new(k, code, params);
    let most: R32 = k.mov(LEAST);
    if let Some(from) = place.largest(k) {
        let from = k.index(from, place.thread, 4);
        let exists = k.setp_u(CmpOp::Lt, place.thread, place.params.parts);
        k.guarded(exists, |k| k.ld_to(most, from));
    }
    let largest = largest_of_cta(k, &code, place.thread, most);
    let multiplier = place.store_factor(k, largest);
    place.for_tiles(k, |k, tile| {
        for (number, (share, _)) in tile.shares.iter().enumerate() {
            let units = place.units.elements(k, share);
            place.store(k, (&tile, number), &units, multiplier);
        }
    });
}
