{{/* The pod of one trainer node: (list $ container-name restart-policy). The operators set PET_NNODES,
     PET_NODE_RANK, PET_MASTER_ADDR and the like, which torchrun reads; without an operator it gets flags. */}}
{{- define "agentrl.trainerPod" -}}
{{- $root := index . 0 -}}
{{- $trainer := $root.Values.trainer -}}
automountServiceAccountToken: false
{{- with index . 2 }}
restartPolicy: {{ . }}
{{- end }}
# SIGTERM lets the step finish and saves it.
terminationGracePeriodSeconds: 600
securityContext: {{- include "agentrl.podSecurity" $root | nindent 2 }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $trainer.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $trainer.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: {{ index . 1 }}
    image: {{ include "agentrl.image" $root.Values.images.trainer }}
    imagePullPolicy: {{ $root.Values.images.trainer.pullPolicy }}
    command:
      - tini
      - --
      - torchrun
      {{- if eq $trainer.kind "Job" }}
      - --nnodes=1
      - --nproc_per_node={{ $trainer.gpusPerNode }}
      {{- end }}
      - -m
      - agentrl.train
    args:
      {{- include "agentrl.flags" $root | nindent 6 }}
      - --engine
      - {{ $root.Values.engines.engine }}
      {{- range $trainer.args }}
      - {{ . | quote }}
      {{- end }}
    env:
      {{- include "agentrl.env" $root | nindent 6 }}
      # After SIGTERM, torch's launcher gives the step this many seconds.
      - {name: TORCH_ELASTIC_SHUTDOWN_TIMEOUT, value: "570"}
    {{- with $trainer.envFrom }}
    envFrom: {{- toYaml . | nindent 6 }}
    {{- end }}
    resources:
      requests: {{- toYaml $trainer.resources.requests | nindent 8 }}
      limits:
        {{- toYaml $trainer.resources.limits | nindent 8 }}
        nvidia.com/gpu: {{ $trainer.gpusPerNode }}
    securityContext: {{- include "agentrl.containerSecurity" $root | nindent 6 }}
    volumeMounts:
      {{- include "agentrl.mounts" (list $root false) | nindent 6 }}
      - {name: shm, mountPath: /dev/shm}
volumes:
  {{- include "agentrl.volumes" (list $root "trainer") | nindent 2 }}
  - name: shm
    emptyDir: {medium: Memory, sizeLimit: {{ $trainer.sharedMemory }}}
{{- end -}}
