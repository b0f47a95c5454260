-- The one order of candidates, as `evolve::rank` has it: `grade` 2 won its second race, 1 raced, 0 has a short timing; then by time, which of
-- one that raced is its incumbent's over the ratio of its last race. What a candidate does on a held-out problem is no fault on its own.

ALTER TABLE standing ADD COLUMN grade INTEGER NOT NULL DEFAULT 0;
CREATE VIEW race AS
  SELECT m.id, m.candidate, 1 + (m.trial = 'held_out' AND m.verdict = 'FASTER') AS grade,
      coalesce(i.us, m.us * m.ratio) / m.ratio AS us,
      coalesce(i.us, m.us * m.ratio) / max(m.ratio_high, m.ratio) AS low_us,
      coalesce(i.us, m.us * m.ratio) / iif(m.ratio_low > 0.0, m.ratio_low, m.ratio) AS high_us
    FROM measurement m JOIN standing s ON (s.candidate, s.problem) = (m.candidate, m.problem)
      LEFT JOIN standing i ON (i.candidate, i.problem, i.kind) = (m.incumbent, m.problem, m.kind)
    WHERE m.trial <> 'microbench' AND m.ratio > 0.0;
CREATE TRIGGER race_ranks AFTER UPDATE OF trial ON standing WHEN new.trial = 'race' BEGIN
  UPDATE standing SET grade = r.grade, us = r.us, low_us = r.low_us, high_us = r.high_us
    FROM (SELECT * FROM race WHERE candidate = new.candidate ORDER BY id DESC LIMIT 1) r WHERE standing.candidate = r.candidate;
END;
CREATE TRIGGER second_race_ranks AFTER INSERT ON measurement WHEN new.trial = 'held_out' BEGIN
  UPDATE standing SET grade = r.grade, us = r.us, low_us = r.low_us, high_us = r.high_us
    FROM (SELECT * FROM race WHERE candidate = new.candidate AND id = new.id) r
    WHERE standing.candidate = r.candidate AND standing.trial = 'race';
END;
UPDATE standing SET trial = trial WHERE trial = 'race';
DROP TRIGGER rejection_counts;
CREATE TRIGGER rejection_counts AFTER INSERT ON rejection BEGIN
  INSERT INTO death SELECT run, arm, new.stage, new.reason, 1 FROM standing WHERE candidate = new.candidate
    ON CONFLICT DO UPDATE SET candidates = candidates + 1;
  UPDATE tally SET rejected = rejected + 1
    WHERE (run, problem, arm) = (SELECT run, problem, arm FROM standing WHERE candidate = new.candidate);
  UPDATE operator_tally SET rejected = rejected + 1
    WHERE (run, operator) = (SELECT run, operator FROM standing WHERE candidate = new.candidate);
  UPDATE standing SET rejected = new.reason WHERE candidate = new.candidate AND new.stage <> 'held_out';
END;
UPDATE standing SET rejected = (SELECT r.reason FROM rejection r WHERE r.candidate = standing.candidate AND r.stage <> 'held_out'
    ORDER BY r.id DESC LIMIT 1)
  WHERE candidate IN (SELECT candidate FROM rejection WHERE stage = 'held_out');
DROP INDEX standing_of_races;
DROP INDEX standing_by_time;
DROP INDEX standing_of_run;
CREATE INDEX standing_by_rank ON standing (problem, device, kind, grade DESC, us) WHERE us IS NOT NULL;
CREATE INDEX standing_of_run ON standing (run, problem, grade DESC, us) WHERE us IS NOT NULL;
