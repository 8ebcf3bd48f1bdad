// Which trajectories were sampled under more than one policy version?
db.getCollection("audit_trajectories").aggregate([
  { $match: { $expr: { $gt: ["$max_version", "$min_version"] } } },
  { $project: { min_version: 1, max_version: 1, turns: 1, score: 1, status: 1, trained_at_steps: 1, staleness: 1, created_at: 1 } },
]).toArray();
