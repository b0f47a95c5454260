-- A time that was taken over from an earlier run was not measured after the forecast: it says nothing of the forecaster.
--
-- Who is out holds no niche and is no corner of a curve: what it kept from being one takes its place. That is seldom, as few are timed
-- before they are found out; so a curve is drawn anew as a whole.

DELETE FROM pair WHERE trial = 'microbench' AND candidate IN (SELECT candidate FROM measurement WHERE length(samples) = 0);
DROP TRIGGER measurement_counts;
CREATE TRIGGER measurement_counts AFTER INSERT ON measurement WHEN new.trial <> 'held_out' BEGIN
  UPDATE tally SET
    timed = timed + (SELECT us IS NULL FROM standing WHERE candidate = new.candidate),
    raced = raced + (new.trial = 'race')
    WHERE (run, problem, arm) = (SELECT run, problem, arm FROM standing WHERE candidate = new.candidate);
  UPDATE operator_tally SET
    timed = timed + (SELECT us IS NULL FROM standing WHERE candidate = new.candidate),
    faster = faster + (new.verdict IS 'FASTER'),
    gain = gain * iif(new.trial = 'race', 1.0, max(1.0, coalesce((SELECT p.us / new.us FROM progress p, standing s WHERE s.candidate = new.candidate
        AND (p.run, p.problem, p.trial, p.arm) = (s.run, s.problem, new.trial, s.arm) ORDER BY p.timed DESC LIMIT 1), 1.0)))
    WHERE (run, operator) = (SELECT run, operator FROM standing WHERE candidate = new.candidate AND arm IN ('evolution', 'random'));
  INSERT INTO progress
    SELECT s.run, s.problem, new.trial, s.arm, iif(new.trial = 'race', t.raced, t.timed), t.candidates, new.at, new.candidate, new.us, new.low_us,
        new.high_us
      FROM standing s JOIN tally t ON (t.run, t.problem, t.arm) = (s.run, s.problem, s.arm)
      WHERE s.candidate = new.candidate AND new.us < coalesce((SELECT p.us FROM progress p
        WHERE (p.run, p.problem, p.trial, p.arm) = (s.run, s.problem, new.trial, s.arm) ORDER BY p.timed DESC LIMIT 1), 9e999)
    ON CONFLICT DO UPDATE SET
      candidate = excluded.candidate, at = excluded.at, us = excluded.us, low_us = excluded.low_us, high_us = excluded.high_us;
  INSERT INTO niche
    SELECT run, problem, bound, tile, 1, candidate, new.us FROM standing
      WHERE candidate = new.candidate AND arm IN ('baseline', 'evolution') AND bound IS NOT NULL AND tile IS NOT NULL
    ON CONFLICT DO UPDATE SET
      timed = timed + 1, candidate = iif(new.us < us, new.candidate, candidate), us = min(us, new.us);
  INSERT INTO pair
    SELECT author, device, id, (SELECT run FROM candidate WHERE id = new.candidate), new.candidate, new.trial, low_us, us,
        high_us, new.us
      FROM forecast
      WHERE candidate = new.candidate AND new.kind = 'measured' AND length(new.samples) > 0
    ON CONFLICT DO UPDATE SET trial = new.trial, measured_us = new.us WHERE trial <> 'race' OR new.trial = 'race';
  UPDATE standing SET won = 1 WHERE candidate = new.candidate AND new.trial = 'race' AND new.verdict = 'FASTER';
  UPDATE standing SET
    trial = new.trial, kind = new.kind, us = new.us, low_us = new.low_us, high_us = new.high_us
    WHERE candidate = new.candidate AND (trial IS NOT 'race' OR new.trial = 'race');
END;

CREATE INDEX standing_of_niches ON standing (run, problem, bound, tile, us)
  WHERE us IS NOT NULL AND (rejected IS NULL OR rejected IN ('slower', 'budget'));
CREATE TRIGGER elite_falls AFTER UPDATE OF rejected ON standing
WHEN new.us IS NOT NULL AND new.rejected NOT IN ('slower', 'budget') AND new.candidate = (SELECT candidate FROM niche
    WHERE (run, problem, bound, tile) = (new.run, new.problem, new.bound, new.tile)) BEGIN
  UPDATE niche SET candidate = s.candidate, us = s.us
    FROM (SELECT candidate, us FROM standing
      WHERE run = new.run AND problem = new.problem AND bound = new.bound AND tile = new.tile AND arm IN ('baseline', 'evolution')
        AND us IS NOT NULL AND (rejected IS NULL OR rejected IN ('slower', 'budget'))
      ORDER BY us LIMIT 1) s
    WHERE (run, problem, bound, tile) = (new.run, new.problem, new.bound, new.tile);
  DELETE FROM niche WHERE (run, problem, bound, tile, candidate) = (new.run, new.problem, new.bound, new.tile, new.candidate);
END;
CREATE TRIGGER corner_falls AFTER UPDATE OF rejected ON standing
WHEN new.us IS NOT NULL AND new.rejected NOT IN ('slower', 'budget') AND EXISTS (SELECT 1 FROM progress
    WHERE run = new.run AND problem = new.problem AND arm = new.arm AND candidate = new.candidate) BEGIN
  DELETE FROM progress WHERE run = new.run AND problem = new.problem AND arm = new.arm;
  INSERT INTO progress
    SELECT new.run, new.problem, trial, new.arm, timed, candidates, at, candidate, us, low_us, high_us
      FROM (SELECT m.trial, m.at, m.candidate, m.us, m.low_us, m.high_us, s.is_sound,
          row_number() OVER told AS timed, max(s.made) OVER told AS candidates,
          min(iif(s.is_sound, m.us, NULL)) OVER (told ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS best
        FROM (SELECT c.id AS candidate, row_number() OVER (ORDER BY c.id) AS made,
              (k.rejected IS NULL OR k.rejected IN ('slower', 'budget')) AS is_sound
            FROM candidate c JOIN standing k ON k.candidate = c.id
            WHERE c.run = new.run AND c.problem = new.problem AND c.arm = new.arm) s
          JOIN measurement m ON m.candidate = s.candidate AND m.problem = new.problem AND m.trial IN ('microbench', 'race')
        WINDOW told AS (PARTITION BY m.trial ORDER BY m.id))
      WHERE is_sound AND us < coalesce(best, 9e999);
END;
UPDATE standing SET rejected = rejected WHERE us IS NOT NULL AND rejected NOT IN ('slower', 'budget');
